"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`. The `anthropic-version` header is not asked for."""


from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deployments.answering import explained, service_of, streamed, whole
from deployments.arrival import arrival_of
from deployments.dialects.messages_answer import MessageEvents, message_object
from deployments.dialects.messages_body import CountTokensRequest, MessagesRequest
from deployments.dialects.named_events import named_events
from deployments.dialects.schemas import AnthropicMessage, MessagesError, TokenCount
from deployments.key_check import caller_of
from deployments.openapi import describe
from deployments.protocol.body import read_request

router = APIRouter()


@router.post(
    "/v1/messages",
    **describe(MessagesRequest, AnthropicMessage, is_work=True, is_stream=True, error=MessagesError),
)
async def messages(request: Request) -> Response:
    arrival_s = arrival_of(request)
    service = service_of(request)
    settings = service.settings
    body = await read_request(request, MessagesRequest, settings.max_body_bytes)
    jobs = await service.chat_jobs(body.chat, arrival_s, caller_of(request, settings), "msg_")
    message_id, num_prompt_tokens = jobs[0].request.request_id, len(jobs[0].request.prompt_token_ids)
    model = settings.served_model_name
    parts = service.chats.parts(body.chat, jobs[0].request.prompt_token_ids)
    explanation = explained(request, service, message_id, body.explain)
    if body.stream:
        events = MessageEvents(message_id, model, num_prompt_tokens, request.state.request_id, parts)
        return streamed(service, jobs, lambda deltas, state: named_events(deltas, events, state, explanation))
    (answer,) = await whole(request, service, jobs)
    message = message_object(message_id, model, num_prompt_tokens, answer, parts)
    return JSONResponse(message | (await explanation() if explanation else {}))


@router.post("/v1/messages/count_tokens", **describe(CountTokensRequest, TokenCount, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    service = service_of(request)
    body = await read_request(request, CountTokensRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    token_ids = await service.prompt_ids(body.chat)
    return JSONResponse({"input_tokens": len(token_ids)})
