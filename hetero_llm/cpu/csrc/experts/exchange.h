// One exchange of the mailbox: the outputs of a layer's experts for the tokens that asked for them.
//
// Tokens are sorted by expert. In the first phase threads share (expert, strip of the inner rows):
// gate, up and the activation; behind a barrier they share strips of the outputs, each of which one
// thread sums over all experts, in ascending order. No sum depends on the number of threads.
// A strip is written to the mailbox as soon as it is complete, each sum with the exchange's number.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../step/arena.h"
#include "../step/team.h"
#include "dots.h"
#include "gates.h"
#include "tiles.h"

namespace hetero::experts {

// Words of the mailbox, as expert_mailbox.py numbers them.
constexpr int kSequence = 0, kLayer = 1, kTokens = 2, kLinked = 3, kWhole = 4;
constexpr int kComing = 0, kStopped = 1, kAnswered = 2;

constexpr int kAddresses = 6;  // of a matrix: data, scale, zero, offset, row_scale, bias

// Mixture and mailbox as hetero_llm/bridge has them, see HostExperts and ExpertMailbox; the C ABI.
struct Setting {
    int64_t layers, experts, hidden, inner, max_tokens, experts_per_token;
    Form gate_up, down;        // [2 * inner, hidden], [hidden, inner]
    GateForm gate;
    Number input;              // of x and of biases
    Order order;               // of the rows of x
    int64_t tile_tokens;       // of an expert, from which on tiles serve if they can; 0: never
    Isa isa;
    // [layers][experts][2][kAddresses]. Experts may change places: the program then writes the
    // data's address, 0 where the host does not hold the expert, before a step that finds it so can
    // ask.
    const int64_t* addresses;
    const int32_t* ids;        // [max_tokens][experts_per_token], negative: not for the host
    const float* weights;      // [max_tokens][experts_per_token]
    const char* x;             // [max_tokens][padded(hidden)], zeros behind hidden
    uint64_t* y;               // [max_tokens][hidden]: a float's bits, the number above them
    const int32_t* request;    // the mailbox's words
    int32_t* answer;
};

// What a mailbox asks for, see expert_mailbox.py. The last `linked` inner rows of every expert are
// the device's: the others are a multiple of kRowDepth, or all. Or `whole` 256ths of the experts
// are, rounded down, those of the highest numbers.
struct Request {
    int32_t number;
    int64_t layer, tokens, linked, whole;
};

// Why a request cannot be answered; 0: it can.
enum class Refusal : int { kNone = 0, kLayer = 2, kTokens = 3, kExpert = 4, kNotHeld = 5, kLinked = 6 };

// The tokens of one expert.
struct Part {
    Matrix gate_up, down;
    int64_t first, rows;  // of the pairs in order
    int64_t block;        // tiles: the first of its blocks of tokens; else -1
};

// A counter on cache lines of its own.
struct alignas(128) Counter {
    std::atomic<int64_t> next{0};
};

class Exchange {
  public:
    Exchange(const Setting& setting, int threads);
    ~Exchange();

    // Reads the ids of a request. Called by one thread, while no other one is in `work`.
    Refusal open(const Request& request);
    // Whether any token wants an expert of the host.
    bool is_empty() const { return parts_.empty(); }
    // Computes y of the tokens that asked; every thread of the team calls it. Thread 0 writes COMING
    // ahead of the end if it is near, so that the device reads y while it is written.
    void work(Team& team, int thread);

  private:
    struct Scratch;

    void forget_numbers(int32_t number);
    void say_coming();
    Matrix matrix_at(const int64_t* addresses, const Form& form) const;
    void plan_tasks();
    template <typename F>
    void share(Counter& counter, int64_t tasks, int thread, F compute);
    void prepare_input(int64_t task);
    void compute_gates(int64_t task, int64_t ahead, Scratch& scratch);
    void gates_by_dots(const Part& part, int64_t first, int64_t count, const char* next,
                       Scratch& scratch);
    void gates_by_tiles(const Part& part, int64_t first, int64_t count, const char* next,
                        Scratch& scratch);
    void add_outputs(int64_t task, int64_t ahead, Scratch& scratch);
    void write_outputs(int64_t first, int64_t count);
    void outputs_by_dots(const Part& part, int64_t first, int64_t count, const char* next,
                         Scratch& scratch);
    void outputs_by_tiles(const Part& part, int64_t first, int64_t count, const char* next,
                          Scratch& scratch);
    void add_output(const Part& part, int64_t row, int64_t first, int64_t count,
                    const float* values);
    const char* strip_of(int64_t task, bool gates) const;
    char* inner_row(int64_t pair) const { return inner_rows_ + pair * inner_stride_; }

    const Setting s_;
    const int threads_;
    const bool bf16_rows_, reads_mailbox_;  // dots take bf16; they take it from the mailbox
    const int64_t tile_tokens_;             // 0: tiles do not serve
    const int64_t mail_stride_, input_stride_, inner_stride_;  // bytes of a row: of x, for dots
    std::vector<int32_t> mail_place_, input_place_, inner_place_, input_tile_place_, inner_tile_place_;

    // Of a request.
    int32_t number_ = 0;
    uint32_t period_ = 4;  // number / 2^30; none at first
    bool is_little_ = false, is_polled_ = false;
    int64_t inner_;  // rows of gates and of ups, columns of down
    Form down_;      // `Setting::down` with depth `inner_`
    std::vector<Part> parts_;       // experts ascending
    std::vector<int32_t> by_rows_;  // parts, those of most tokens first
    std::vector<int32_t> starts_, tokens_, wanted_;  // wanted: tokens with experts on the host
    std::vector<float> weights_;                     // of pairs
    std::vector<int64_t> packed_pairs_;              // pairs that tiles serve
    std::vector<int32_t> pair_block_, pair_column_;  // where tiles have a pair
    int64_t pairs_ = 0, inputs_ = 0, gate_strip_ = 0, gate_strips_ = 0, output_strip_ = 0,
            output_strips_ = 0, prepared_ = 0;
    bool dots_serve_ = false;
    Buffer<float> sums_;  // [max_tokens][hidden]
    Buffer<char> input_rows_, inner_rows_;
    Buffer<uint16_t> input_blocks_, inner_blocks_;
    Counter prepare_next_, gate_next_, output_next_;
    std::unique_ptr<Scratch[]> scratch_;
};

}  // namespace hetero::experts
