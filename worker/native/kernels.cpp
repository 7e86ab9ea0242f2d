// What Python calls: a whole step of a Llama-like decoder, attention alone, the best tokens, the tokens that may be
// chosen, and a read of memory for measuring it.
//
// All pointers belong to the caller. Nothing is allocated for longer than a call, nothing is remembered between calls.
#include <omp.h>

#include "attention.h"
#include "best.h"
#include "matrix.h"
#include "rows.h"
#include "selection.h"

struct Layer {
    const float* input_norm;
    const float* post_attention_norm;
    const float* query_norm;  // null: queries and keys are not normalized
    const float* key_norm;
    Linear qkv;
    Linear output;
    Linear gate_up;  // 16 gate outputs, 16 up outputs, and so on
    Linear down;
    void* keys;
    void* values;
    int64_t window;
};

struct Decoder {
    const Layer* layers;
    const void* embedding;
    const float* final_norm;
    Linear head;
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_size, block_size;
    float epsilon, scale;
};

// T tokens, R rows, S rows whose logits are wanted. cosine and sine are [num_positions, head_size / 2].
struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    const float* cosine;
    const float* sine;
    const int64_t* tables;
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int64_t* logit_rows;
    int64_t num_tokens, num_rows, table_width, num_logit_rows, num_positions;
};

// Working memory for the largest step: residual [T, hidden], qkv [T, (heads + 2 kv_heads) head_size] and logits in
// float32; the others in the model's numbers; scratch: `scratch_floats` for each thread.
struct Buffers {
    float* residual;
    float* qkv;
    void* normed;     // [T, hidden]
    void* query;      // [T, heads, head_size]
    void* attended;   // [T, heads, head_size]
    void* activated;  // [T, intermediate]
    float* scratch;
    float* logits;  // [S, vocabulary]
};

constexpr int MAX_HEAD_SIZE = 256;
// Neighbouring tokens share cache lines of their block, and a token is done sooner than it is handed out: a thread takes
// so many, if there are enough for all.
constexpr int TOKENS_AT_ONCE = 16;

namespace {

// `item(token)` for each of `tokens` tokens, some neighbours at a time on one thread.
template <class Item>
void each_token(Member& member, int tokens, Item item) {
    const int at_once = std::clamp(tokens / (4 * member.team_size()), 1, TOKENS_AT_ONCE);
    member.each((tokens + at_once - 1) / at_once, [&](int part) {
        const int end = std::min(tokens, (part + 1) * at_once);
        for (int token = part * at_once; token < end; ++token) item(token);
    });
}

template <class T>
void attend_all(Member& member, const Attention& a, const std::vector<AttentionItem>& items, float* scratch) {
    member.each(static_cast<int>(items.size()), [&](int item) { attend<T>(a, items[item], scratch); });
}

template <class T>
void place_heads(const Decoder& d, const Layer& layer, const Cache& cache, const Step& step, const Buffers& buffers,
                 int token) {
    const int size = static_cast<int>(d.head_size);
    const float* cosine = step.cosine + step.positions[token] * (size / 2);
    const float* sine = step.sine + step.positions[token] * (size / 2);
    const int64_t heads = d.heads, kv_heads = d.kv_heads;
    float* from = buffers.qkv + static_cast<size_t>(token) * (heads + 2 * kv_heads) * size;
    T* query = static_cast<T*>(buffers.query) + static_cast<size_t>(token) * heads * size;
    for (int64_t head = 0; head < heads; ++head, from += size) {
        if (layer.query_norm) rms_norm(from, layer.query_norm, d.epsilon, size, from);
        rotate(from, cosine, sine, size, query + head * size);
    }
    alignas(64) T key[MAX_HEAD_SIZE], value[MAX_HEAD_SIZE];
    for (int64_t head = 0; head < kv_heads; ++head, from += size) {
        if (layer.key_norm) rms_norm(from, layer.key_norm, d.epsilon, size, from);
        rotate(from, cosine, sine, size, key);
        copy(from + kv_heads * size, value, size);
        store_token<T>(cache, step.slots[token], head, key, value);
    }
}

template <class T>
void run_layer(Member& member, const Decoder& d, const Layer& layer, const Step& step, const Buffers& buffers,
               const std::vector<AttentionItem>& items, float* scratch) {
    const int tokens = static_cast<int>(step.num_tokens), hidden = static_cast<int>(d.hidden);
    T* normed = static_cast<T*>(buffers.normed);
    const auto norm = [&](const float* weight) {
        each_token(member, tokens, [&](int token) {
            rms_norm(buffers.residual + static_cast<size_t>(token) * hidden, weight, d.epsilon, hidden,
                     normed + static_cast<size_t>(token) * hidden);
        });
    };
    const auto add_to_residual = [&](int row, int column, const __m512* sums) {
        float* to = buffers.residual + static_cast<size_t>(row) * hidden + column;
        UNROLL for (int j = 0; j < PANEL_VECTORS; ++j) {
            const __mmask16 lanes = first_lanes(hidden - column - j * LANES);
            store(to + j * LANES, _mm512_add_ps(load(to + j * LANES, lanes), sums[j]), lanes);
        }
    };
    norm(layer.input_norm);
    multiply(member, layer.qkv, normed, tokens, [&](int row, int column, const __m512* sums) {
        float* to = buffers.qkv + static_cast<size_t>(row) * layer.qkv.n + column;
        UNROLL for (int j = 0; j < PANEL_VECTORS; ++j)
            store(to + j * LANES, sums[j], first_lanes(layer.qkv.n - column - j * LANES));
    });
    const Cache cache{layer.keys, layer.values, d.block_size, d.kv_heads, d.head_size};
    each_token(member, tokens, [&](int token) { place_heads<T>(d, layer, cache, step, buffers, token); });
    const Attention attention{cache,         buffers.query,    buffers.attended, step.tables, step.query_starts,
                              step.context_lens, step.num_rows, step.table_width, d.heads,     layer.window,
                              d.scale};
    attend_all<T>(member, attention, items, scratch);
    multiply(member, layer.output, static_cast<const T*>(buffers.attended), tokens, add_to_residual);
    norm(layer.post_attention_norm);
    T* activated = static_cast<T*>(buffers.activated);
    multiply(member, layer.gate_up, normed, tokens, [&](int row, int column, const __m512* sums) {
        T* to = activated + static_cast<size_t>(row) * d.intermediate + column / 2;
        store(to, _mm512_mul_ps(silu(sums[0]), sums[1]));
    });
    multiply(member, layer.down, activated, tokens, add_to_residual);
}

// Whether every token has an embedding and an angle.
bool are_known(const Decoder& d, const Step& step) {
    const auto is_below = [](int64_t number, int64_t limit) { return number >= 0 && number < limit; };
    for (int64_t token = 0; token < step.num_tokens; ++token)
        if (!is_below(step.token_ids[token], d.head.n) || !is_below(step.positions[token], step.num_positions))
            return false;
    return true;
}

template <class T>
bool run_step(const Decoder& d, const Step& step, const Buffers& buffers, int num_threads) {
    if (!are_known(d, step)) return false;
    const int hidden = static_cast<int>(d.hidden);
    const std::vector<AttentionItem> items =
        attention_items(step.query_starts, step.num_rows, d.heads, d.kv_heads, num_threads);
    const size_t scratch_size = attention_scratch(d.heads, d.kv_heads, d.head_size);
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    {
        Member member(team);
        float* scratch = buffers.scratch + omp_get_thread_num() * scratch_size;
        each_token(member, static_cast<int>(step.num_tokens), [&](int token) {
            copy(static_cast<const T*>(d.embedding) + step.token_ids[token] * hidden,
                 buffers.residual + static_cast<size_t>(token) * hidden, hidden);
        });
        for (int64_t layer = 0; layer < d.num_layers; ++layer)
            run_layer<T>(member, d, d.layers[layer], step, buffers, items, scratch);
        T* normed = static_cast<T*>(buffers.normed);
        const int logit_rows = static_cast<int>(step.num_logit_rows);
        each_token(member, logit_rows, [&](int row) {
            rms_norm(buffers.residual + step.logit_rows[row] * hidden, d.final_norm, d.epsilon, hidden,
                     normed + static_cast<size_t>(row) * hidden);
        });
        multiply(member, d.head, normed, logit_rows, [&](int row, int column, const __m512* sums) {
            float* to = buffers.logits + static_cast<size_t>(row) * d.head.n + column;
            UNROLL for (int j = 0; j < PANEL_VECTORS; ++j)
                store(to + j * LANES, sums[j], first_lanes(d.head.n - column - j * LANES));
        });
    }
    return true;
}

template <class T>
void run_attention(const Attention& a, float* scratch, int num_threads) {
    const std::vector<AttentionItem> items =
        attention_items(a.query_starts, a.num_rows, a.heads, a.cache.kv_heads, num_threads);
    const size_t scratch_size = attention_scratch(a.heads, a.cache.kv_heads, a.cache.head_size);
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    {
        Member member(team);
        attend_all<T>(member, a, items, scratch + omp_get_thread_num() * scratch_size);
    }
}

// keys and values: [tokens, kv_heads, head_size]; token t goes to slots[t].
template <class T>
void store_tokens(const Cache& cache, const void* keys, const void* values, const int64_t* slots, int64_t num_tokens) {
    const int64_t size = cache.head_size;
    for (int64_t place = 0; place < num_tokens * cache.kv_heads; ++place)
        store_token<T>(cache, slots[place / cache.kv_heads], place % cache.kv_heads,
                       static_cast<const T*>(keys) + place * size, static_cast<const T*>(values) + place * size);
}

}  // namespace

extern "C" {

int64_t scratch_floats(int64_t heads, int64_t kv_heads, int64_t head_size) {
    return static_cast<int64_t>(attention_scratch(heads, kv_heads, head_size));
}

bool decoder_step_float32(const Decoder* decoder, const Step* step, const Buffers* buffers, int num_threads) {
    return run_step<float>(*decoder, *step, *buffers, num_threads);
}

bool decoder_step_bfloat16(const Decoder* decoder, const Step* step, const Buffers* buffers, int num_threads) {
    return run_step<Bf16>(*decoder, *step, *buffers, num_threads);
}

void attention_float32(const Attention* attention, float* scratch, int num_threads) {
    run_attention<float>(*attention, scratch, num_threads);
}

void attention_bfloat16(const Attention* attention, float* scratch, int num_threads) {
    run_attention<Bf16>(*attention, scratch, num_threads);
}

void store_float32(const Cache* cache, const void* keys, const void* values, const int64_t* slots, int64_t num_tokens) {
    store_tokens<float>(*cache, keys, values, slots, num_tokens);
}

void store_bfloat16(const Cache* cache, const void* keys, const void* values, const int64_t* slots,
                    int64_t num_tokens) {
    store_tokens<Bf16>(*cache, keys, values, slots, num_tokens);
}

void find_best_tokens(const BestTokens* best, int num_threads) {
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    Member(team).each(static_cast<int>(best->num_rows), [&](int place) { find_best_token(*best, place); });
}

void select_tokens_of_rows(const Selection* selection, int num_threads) {
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    Member(team).each(static_cast<int>(selection->num_rows), [&](int row) { select_tokens(*selection, row); });
}

// Reads `size` words once, each thread its own part, and returns what keeps the compiler from leaving it out.
int64_t read_words(const int64_t* words, int64_t size, int num_threads) {
    int64_t total = 0;
#pragma omp parallel for simd num_threads(num_threads) reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += words[i];
    return total;
}
}
