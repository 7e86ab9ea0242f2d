"""OpenAI's `/v1/responses`."""

import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deployments.answering import service_of, streamed, whole
from deployments.dialects.named_events import named_events
from deployments.dialects.responses_answer import ResponseEnvelope, ResponseEvents, ResponseText
from deployments.dialects.responses_body import ResponsesRequest
from deployments.dialects.schemas import ResponseObject
from deployments.key_check import caller_of
from deployments.openapi import describe
from deployments.protocol.body import read_request

router = APIRouter()


@router.post("/v1/responses", **describe(ResponsesRequest, ResponseObject, is_work=True, is_stream=True))
async def responses(request: Request) -> Response:
    arrival_s = time.monotonic()
    service = service_of(request)
    settings = service.settings
    body = await read_request(request, ResponsesRequest, settings.max_body_bytes)
    jobs = await service.chat_jobs(body.chat, arrival_s, caller_of(request, settings), "resp_")
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
    if body.stream:
        events = ResponseEvents(envelope, token_text)
        return streamed(service, jobs, lambda deltas, state: named_events(deltas, events, state))
    text = ResponseText(envelope, token_text)
    (answer,) = await whole(request, service, jobs)
    text.add(answer)
    return JSONResponse(text.response())
