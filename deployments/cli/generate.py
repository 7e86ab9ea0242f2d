"""`stallfree generate`: prompts in, completions out, on an engine in this process, without Ray.

Owns the reading of prompts and the printing of answers. Standard output carries the answers and nothing else.
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    OneLineParser,
    UsageError,
    add_engine_options,
    engine_config_from,
    error_line,
    option_of,
    usage_error,
    whole_number,
)
from deployments.cli.progress import ProgressLine
from worker.config import ConfigError
from worker.sampling_choices import SamplingChoices, SamplingError

if TYPE_CHECKING:
    from worker.llm import LLM, Completion

DEFAULT_MAX_TOKENS = 256
_EARLY_STOPPING: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}

_DESCRIPTION = """\
Completes prompts with an engine in this process. Prints the completions, in the order of the prompts, and nothing
else; progress goes to standard error. Sampling options that are not given are those of the model's
generation_config.json; what that leaves open is as in OpenAI's API (temperature 1, everything else off)."""


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "generate", help="complete prompts in this process", description=_DESCRIPTION, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeat it for several")
    source.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a file that is one prompt (without its last line end), or, if its name ends in .jsonl, holds one a "
        "line: a JSON string, or an object with `prompt`; without --prompt and --prompt-file, standard input is "
        "one prompt",
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message to the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line; the last holds the stats")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=whole_number, default=DEFAULT_MAX_TOKENS, metavar="N",
                          help="longest answer, if the model length allows it (default: %(default)s)")  # fmt: skip
    sampling.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token each time")
    sampling.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens of this share; 1: off")
    sampling.add_argument("--top-k", type=whole_number, metavar="K", help="draw from the K likeliest tokens; 0: off")
    sampling.add_argument("--min-p", type=float, metavar="P",
                          help="drop tokens below this share of the likeliest one's probability; 0: off")  # fmt: skip
    sampling.add_argument("--seed", type=whole_number, metavar="N", help="same seed, same answer (default: random)")
    sampling.add_argument("--n", type=whole_number, default=1, metavar="N", help="answers to each prompt")
    sampling.add_argument("--beam-width", type=whole_number, metavar="N",
                          help="beam search with so many beams in place of sampling")  # fmt: skip
    sampling.add_argument("--length-penalty", type=float, default=1.0, metavar="P",
                          help="beams score log-probability / length to this power (default: %(default)s)")  # fmt: skip
    sampling.add_argument("--early-stopping", choices=list(_EARLY_STOPPING), default="false",
                          help="end a beam search as soon as enough beams have ended; false: when the others are "
                          "unlikely to do better; never: when they cannot")  # fmt: skip
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    add_engine_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    choices = _sampling_choices(args)
    prompts = _prompts(args)
    _quiet_libraries()

    from worker.demo_model import DemoModelError
    from worker.llm import LLM
    from worker.model_support import UnsupportedModelError
    from worker.request_checks import RequestError
    from worker.text import ChatTemplateError, TokenizerError
    from worker.weights import WeightsError

    try:
        llm = LLM(config)
        completions = _complete(llm, prompts, choices, is_chat=args.chat)
    except ConfigError as error:
        raise usage_error(error) from error
    except SamplingError as error:
        raise _sampling_usage_error(error) from error
    except (WeightsError, UnsupportedModelError, TokenizerError) as error:
        raise UsageError("--model", str(error)) from error
    except ChatTemplateError as error:
        raise UsageError("--chat", str(error)) from error
    except RequestError as error:
        sys.stderr.write(error_line(str(error)))
        return EXIT_USAGE
    except DemoModelError as error:
        sys.stderr.write(error_line(str(error)))
        return EXIT_FAILED
    return _print(prompts, completions, llm.stats(), as_json=args.json)


def _complete(llm: "LLM", prompts: list[str], choices: SamplingChoices, *, is_chat: bool) -> "list[Completion]":
    with ProgressLine(sys.stderr) as progress:
        if is_chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            return llm.chat(conversations, choices, progress.update)
        return llm.generate(prompts, choices, progress.update)


def _print(prompts: list[str], completions: "list[Completion]", stats: dict[str, Any], *, as_json: bool) -> int:
    exit_code = 0
    num_choices = len(completions) // len(prompts)
    for place, completion in enumerate(completions):
        if as_json:
            line = {
                "prompt": prompts[place // num_choices],
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(line if completion.error is None else {**line, "error": completion.error}))
        else:
            print(completion.text)
        if completion.error is not None:
            sys.stderr.write(error_line(completion.error))
            exit_code = EXIT_FAILED
    if as_json:
        print(json.dumps({"stats": stats}))
    return exit_code


def _sampling_choices(args: argparse.Namespace) -> SamplingChoices:
    choices = SamplingChoices(
        max_tokens=args.max_tokens,
        n=args.n,
        beam_width=args.beam_width,
        length_penalty=args.length_penalty,
        early_stopping=_EARLY_STOPPING[args.early_stopping],
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    try:
        choices.check()
    except SamplingError as error:
        raise _sampling_usage_error(error) from error
    return choices


def _sampling_usage_error(error: SamplingError) -> UsageError:
    return UsageError(option_of(error.option), str(error).removeprefix(f"{error.option}: "))


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt is not None:
        prompts: list[str] = args.prompt
        return prompts
    if args.prompt_file is None:
        if sys.stdin.isatty():
            sys.stderr.write("reading the prompt from standard input; end it with Ctrl-D\n")
        return [_without_last_line_end(_decoded(sys.stdin.buffer.read(), "standard input"))]
    try:
        text = _decoded(Path(args.prompt_file).read_bytes(), "--prompt-file")
    except OSError as error:
        raise UsageError("--prompt-file", f"{args.prompt_file}: {error.strerror}") from error
    if not args.prompt_file.endswith(".jsonl"):
        return [_without_last_line_end(text)]
    prompts = [_prompt_of_line(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise UsageError("--prompt-file", f"{args.prompt_file} holds no prompt")
    return prompts


def _prompt_of_line(line: str, number: int) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError("--prompt-file", f"line {number} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UsageError("--prompt-file", f"line {number} is neither a string nor an object with a string `prompt`")
    return prompt


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(source, f"is not UTF-8 text: {error}") from error


def _without_last_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _quiet_libraries() -> None:
    """Advice that libraries give to programmers is noise to who asked for an answer. `python -W` brings it back."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    from transformers.utils import logging as library_logging

    library_logging.set_verbosity(logging.ERROR)
