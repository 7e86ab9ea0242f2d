// What Python calls: a whole step of a Llama-like decoder, attention alone, the tokens that may be chosen, and a read
// of memory for measuring it.
//
// All pointers belong to the caller. Nothing is allocated for longer than a call, nothing is remembered between calls.
#include <omp.h>

#include "attention.h"
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

// T tokens, R rows, S rows whose logits are wanted. cosine and sine are [T, head_size / 2].
struct Step {
    const int64_t* token_ids;
    const int64_t* slots;
    const float* cosine;
    const float* sine;
    const int64_t* tables;
    const int64_t* query_starts;
    const int64_t* context_lens;
    const int64_t* logit_rows;
    int64_t num_tokens, num_rows, table_width, num_logit_rows;
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

namespace {

template <class T>
void place_heads(const Decoder& d, const Layer& layer, const Step& step, const Buffers& buffers, int token) {
    const int size = static_cast<int>(d.head_size);
    const float* cosine = step.cosine + static_cast<size_t>(token) * (size / 2);
    const float* sine = step.sine + static_cast<size_t>(token) * (size / 2);
    const int64_t heads = d.heads, kv_heads = d.kv_heads;
    float* from = buffers.qkv + static_cast<size_t>(token) * (heads + 2 * kv_heads) * size;
    const size_t slot = static_cast<size_t>(step.slots[token]) * kv_heads * size;
    T* query = static_cast<T*>(buffers.query) + static_cast<size_t>(token) * heads * size;
    for (int64_t head = 0; head < heads + kv_heads; ++head, from += size) {
        const float* norm = head < heads ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm(from, norm, d.epsilon, size, from);
        rotate(from, cosine, sine, size,
               head < heads ? query + head * size : static_cast<T*>(layer.keys) + slot + (head - heads) * size);
    }
    copy(from, static_cast<T*>(layer.values) + slot, static_cast<int>(kv_heads * size));
}

template <class T>
void run_layer(Member& member, const Decoder& d, const Layer& layer, const Step& step, const Buffers& buffers,
               const std::vector<AttentionItem>& items, float* scratch) {
    const int tokens = static_cast<int>(step.num_tokens), hidden = static_cast<int>(d.hidden);
    T* normed = static_cast<T*>(buffers.normed);
    const auto norm = [&](const float* weight) {
        member.each(tokens, [&](int token) {
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
    member.each(tokens, [&](int token) { place_heads<T>(d, layer, step, buffers, token); });
    const Attention attention{buffers.query, layer.keys,       layer.values,     buffers.attended, step.tables,
                              step.query_starts, step.context_lens, step.num_rows, step.table_width, d.block_size,
                              d.heads,       d.kv_heads,       d.head_size,      layer.window,     d.scale};
    member.each(static_cast<int>(items.size() * d.kv_heads), [&](int item) {
        attend<T>(attention, items[item / d.kv_heads], static_cast<int>(item % d.kv_heads), scratch);
    });
    multiply(member, layer.output, static_cast<const T*>(buffers.attended), tokens, add_to_residual);
    norm(layer.post_attention_norm);
    T* activated = static_cast<T*>(buffers.activated);
    multiply(member, layer.gate_up, normed, tokens, [&](int row, int column, const __m512* sums) {
        T* to = activated + static_cast<size_t>(row) * d.intermediate + column / 2;
        store(to, _mm512_mul_ps(silu(sums[0]), sums[1]));
    });
    multiply(member, layer.down, activated, tokens, add_to_residual);
}

template <class T>
void run_step(const Decoder& d, const Step& step, const Buffers& buffers, int num_threads) {
    const int hidden = static_cast<int>(d.hidden);
    const std::vector<AttentionItem> items = attention_items(
        {nullptr, nullptr, nullptr, nullptr, step.tables, step.query_starts, step.context_lens, step.num_rows,
         step.table_width, d.block_size, d.heads, d.kv_heads, d.head_size, 0, d.scale});
    const size_t scratch_size = attention_scratch(d.heads, d.kv_heads, d.head_size);
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    {
        Member member(team);
        float* scratch = buffers.scratch + omp_get_thread_num() * scratch_size;
        member.each(static_cast<int>(step.num_tokens), [&](int token) {
            copy(static_cast<const T*>(d.embedding) + step.token_ids[token] * hidden,
                 buffers.residual + static_cast<size_t>(token) * hidden, hidden);
        });
        for (int64_t layer = 0; layer < d.num_layers; ++layer)
            run_layer<T>(member, d, d.layers[layer], step, buffers, items, scratch);
        T* normed = static_cast<T*>(buffers.normed);
        const int logit_rows = static_cast<int>(step.num_logit_rows);
        member.each(logit_rows, [&](int row) {
            rms_norm(buffers.residual + step.logit_rows[row] * hidden, d.final_norm, d.epsilon, hidden,
                     normed + static_cast<size_t>(row) * hidden);
        });
        multiply(member, d.head, normed, logit_rows, [&](int row, int column, const __m512* sums) {
            float* to = buffers.logits + static_cast<size_t>(row) * d.head.n + column;
            UNROLL for (int j = 0; j < PANEL_VECTORS; ++j)
                store(to + j * LANES, sums[j], first_lanes(d.head.n - column - j * LANES));
        });
    }
}

template <class T>
void run_attention(const Attention& a, float* scratch, int num_threads) {
    const std::vector<AttentionItem> items = attention_items(a);
    const size_t scratch_size = attention_scratch(a.heads, a.kv_heads, a.head_size);
    Team team{num_threads};
#pragma omp parallel num_threads(num_threads)
    Member(team).each(static_cast<int>(items.size() * a.kv_heads), [&](int item) {
        attend<T>(a, items[item / a.kv_heads], static_cast<int>(item % a.kv_heads),
                  scratch + omp_get_thread_num() * scratch_size);
    });
}

}  // namespace

extern "C" {

int64_t scratch_floats(int64_t heads, int64_t kv_heads, int64_t head_size) {
    return static_cast<int64_t>(attention_scratch(heads, kv_heads, head_size));
}

void decoder_step_float32(const Decoder* decoder, const Step* step, const Buffers* buffers, int num_threads) {
    run_step<float>(*decoder, *step, *buffers, num_threads);
}

void decoder_step_bfloat16(const Decoder* decoder, const Step* step, const Buffers* buffers, int num_threads) {
    run_step<Bf16>(*decoder, *step, *buffers, num_threads);
}

void attention_float32(const Attention* attention, float* scratch, int num_threads) {
    run_attention<float>(*attention, scratch, num_threads);
}

void attention_bfloat16(const Attention* attention, float* scratch, int num_threads) {
    run_attention<Bf16>(*attention, scratch, num_threads);
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
