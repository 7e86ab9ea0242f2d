"""`/tokenize`, `/detokenize`, `/version`: what the server's tokenizer makes of a text, and who it is."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from deployments.answering import service_of
from deployments.dialects.schemas import Detokenized, Tokenized, Version
from deployments.dialects.tokens_body import DetokenizeRequest, TokenizeRequest
from deployments.openapi import describe
from deployments.protocol.body import read_request
from deployments.protocol.sampling import check_token_ids

router = APIRouter()

_VERSION = version("stallfree")


@router.post("/tokenize", **describe(TokenizeRequest, Tokenized))
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    settings = service.settings
    body = await read_request(request, TokenizeRequest, settings.max_body_bytes)
    service.check_model(body.model)
    if body.messages is not None:
        add_generation_prompt = body.add_generation_prompt is not False
        token_ids = await service.prompt_ids(body.chat, add_generation_prompt=add_generation_prompt)
    else:
        prompt = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await service.off_loop(
            len(prompt), lambda: service.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        )
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": settings.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token_id)[0] for token_id in token_ids]
    return JSONResponse(answer)


@router.post("/detokenize", **describe(DetokenizeRequest, Detokenized))
async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = await read_request(request, DetokenizeRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    check_token_ids(body.tokens, service.settings.vocab_size, "tokens")
    text = await service.off_loop(
        len(body.tokens), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return JSONResponse({"prompt": text})


@router.get("/version", **describe(None, Version))
async def get_version() -> Response:
    return JSONResponse({"version": _VERSION})
