"""OpenAI's `/v1/responses`."""

import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deployments.answering import explained, service_of, streamed, told
from deployments.arrival import arrival_of
from deployments.dialects.named_events import named_events
from deployments.dialects.responses_answer import ResponseEnvelope, ResponseOutput
from deployments.dialects.responses_body import ResponsesRequest
from deployments.dialects.responses_events import ResponseEvents
from deployments.dialects.schemas import ResponseObject
from deployments.key_check import caller_of
from deployments.openapi import describe
from deployments.protocol.body import read_request
from deployments.protocol.errors import ApiError, renamed

router = APIRouter()

#: of fields that chats name otherwise
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}


@router.post("/v1/responses", **describe(ResponsesRequest, ResponseObject, is_work=True, is_stream=True))
async def responses(request: Request) -> Response:
    arrival_s = arrival_of(request)
    service = service_of(request)
    settings = service.settings
    body = await read_request(request, ResponsesRequest, settings.max_body_bytes)
    try:
        jobs = await service.chat_jobs(body.chat, arrival_s, caller_of(request, settings), "resp_")
    except ApiError as error:
        raise renamed(error, _NAMES) from error
    asked = jobs[0].request
    envelope = ResponseEnvelope(
        response_id=asked.request_id,
        created_s=int(time.time()),
        model=settings.served_model_name,
        request=body,
        num_prompt_tokens=len(asked.prompt_token_ids),
        temperature=asked.params.temperature,
        top_p=asked.params.top_p,
    )
    token_text = service.tokenizer.token_text if body.with_logprobs else None
    output = ResponseOutput(envelope, token_text, service.chats.parts(body.chat, asked.prompt_token_ids))
    explanation = explained(request, service, asked.request_id, body.explain)
    if body.stream:
        events = ResponseEvents(output)
        return streamed(service, jobs, lambda deltas, state: named_events(deltas, events, state, explanation))
    await told(request, service, jobs, output.add)
    return JSONResponse(output.response() | (await explanation() if explanation else {}))
