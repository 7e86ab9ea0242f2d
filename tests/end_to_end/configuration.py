"""How the servers of these tests are started."""

MODEL = "demo"
MAX_MODEL_LEN = 2048
#: small, so that steps are short: a request that is left ends with the step that runs
TOKEN_BUDGET = 128

#: float32, where answers are the same in every batch; one thread, since the clients need the other core
DEMO_OPTIONS = ("--model", MODEL, "--dtype", "float32", "--num-threads", "1", "--drain-timeout-s", "3")
#: a pool that holds all that the tests send at once, so that nothing is preempted
AMPLE_OPTIONS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(TOKEN_BUDGET)),
    *("--kv-cache-memory", "768MiB"),
)
