// Runs AMX instructions on a machine that has none: there each raises SIGILL, and the handler does what Intel's
// manual says of it. Only what the kernels use is known; anything else, and whatever a CPU would refuse, aborts.

#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <xmmintrin.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, WORDS = ROW_BYTES / 4 };
enum { CONFIGURE, RELEASE, ZERO, LOAD, STORE, MULTIPLY, KINDS };

atomic_long amx_counts[KINDS];

typedef union {
  uint32_t bits[ROWS][WORDS];
  float numbers[ROWS][WORDS];
} Tile;

static _Thread_local struct {
  int configured;
  uint16_t row_bytes[TILES];
  uint8_t rows[TILES];
  Tile tiles[TILES];
} state;

static void require(int fine, const char* what) {
  if (fine) return;
  fprintf(stderr, "AMX: %s\n", what);
  abort();
}

static void require_tile(int tile) {
  require(state.configured, "tiles that are not configured");
  require(state.rows[tile] && state.row_bytes[tile] % 4 == 0, "a tile without a shape");
}

static void configure(const uint8_t* from) {
  static const uint8_t zeros[16];
  require(from[0] == 1 && from[1] == 0, "a palette or a first row that is not known here");
  require(!memcmp(from + 2, zeros, 14) && !memcmp(from + 32, zeros, 16) && !memcmp(from + 56, zeros, 8),
          "reserved bytes of a configuration that are not zero");
  memset(&state, 0, sizeof(state));
  memcpy(state.row_bytes, from + 16, sizeof(state.row_bytes));
  memcpy(state.rows, from + 48, sizeof(state.rows));
  for (int t = 0; t < TILES; ++t)
    require(state.rows[t] <= ROWS && state.row_bytes[t] <= ROW_BYTES && !state.rows[t] == !state.row_bytes[t],
            "a tile that is too large, or has rows without bytes");
  state.configured = 1;
}

static void move(int tile, uint8_t* memory, int64_t stride, int store) {
  require_tile(tile);
  Tile* at = &state.tiles[tile];
  if (!store) memset(at, 0, sizeof(*at));
  for (int r = 0; r < state.rows[tile]; ++r) {
    if (store) memcpy(memory + r * stride, at->bits[r], state.row_bytes[tile]);
    else memcpy(at->bits[r], memory + r * stride, state.row_bytes[tile]);
  }
}

// Sums of the even and of the odd products, each rounded once for each product, then added to each other and to what
// the tile holds.
static __attribute__((noinline)) void multiply(int to, int left, int right) {
  require_tile(to), require_tile(left), require_tile(right);
  require(to != left && to != right && left != right, "a product of tiles that are not distinct");
  require(state.rows[to] == state.rows[left] && state.row_bytes[to] == state.row_bytes[right] &&
              state.row_bytes[left] == 4 * state.rows[right],
          "a product of tiles whose shapes do not match");
  const int columns = state.row_bytes[to] / 4, depth = state.rows[right];
  Tile even, odd;
  for (int k = 0; k < ROWS; ++k)
    for (int n = 0; n < WORDS; ++n) {
      even.bits[k][n] = state.tiles[right].bits[k][n] << 16;
      odd.bits[k][n] = state.tiles[right].bits[k][n] & 0xffff0000u;
    }
  for (int m = 0; m < state.rows[to]; ++m) {
    float sums[2][WORDS] = {{0}};
    for (int k = 0; k < depth; ++k) {
      const union { uint32_t bits; float number; } first = {state.tiles[left].bits[m][k] << 16},
          second = {state.tiles[left].bits[m][k] & 0xffff0000u};
      for (int n = 0; n < WORDS; ++n) {
        sums[0][n] = __builtin_fmaf(first.number, even.numbers[k][n], sums[0][n]);
        sums[1][n] = __builtin_fmaf(second.number, odd.numbers[k][n], sums[1][n]);
      }
    }
    for (int n = 0; n < columns; ++n) state.tiles[to].numbers[m][n] += sums[0][n] + sums[1][n];
  }
}

static int64_t general_register(const gregset_t registers, int number) {
  static const int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[places[number]];
}

static void on_illegal_instruction(int signal_number, siginfo_t* info, void* context) {
  (void)signal_number, (void)info;
  _mm_setcsr(0x9fc0);  // tiles round to nearest even and flush denormals; the thread's own mode comes back
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* code = (const uint8_t*)registers[REG_RIP];
  // C4, then inverted R X B and the opcode map, then W, inverted v v v v, L and the prefix.
  require(code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0, "an illegal instruction");
  const int prefix = code[2] & 3, third = ~code[2] >> 3 & 15, opcode = code[3];
  const int mode = code[4] >> 6, field = code[4] >> 3 & 7, low = code[4] & 7;
  const int index_high = (~code[1] >> 6 & 1) * 8, base_high = (~code[1] >> 5 & 1) * 8;
  const uint8_t* next = code + 5;
  uint8_t* memory = NULL;
  int64_t stride = 0;
  if (mode != 3) {
    int64_t address = 0;
    int wide = mode == 2;  // the displacement, of 32 bits
    if (low == 4) {
      const int index = (*next >> 3 & 7) + index_high, base = *next & 7;
      if (index != 4) stride = general_register(registers, index) << (*next >> 6);
      if (mode == 0 && base == 5) wide = 1;
      else address = general_register(registers, base + base_high);
      ++next;
    } else if (mode == 0 && low == 5) {
      address = (int64_t)(next + 4);  // relative to the next instruction
      wide = 1;
    } else {
      address = general_register(registers, low + base_high);
    }
    int32_t displacement = mode == 1 ? (int8_t)*next : 0;
    if (wide) memcpy(&displacement, next, 4);
    next += wide ? 4 : mode == 1;
    memory = (uint8_t*)(address + displacement);
  }
  const int with_sib = mode != 3 && low == 4;
  int kind = KINDS;
  if (opcode == 0x49 && prefix == 0 && mode != 3) kind = CONFIGURE, configure(memory + stride);
  else if (opcode == 0x49 && prefix == 0 && code[4] == 0xc0) kind = RELEASE, memset(&state, 0, sizeof(state));
  else if (opcode == 0x49 && prefix == 3 && mode == 3 && low == 0)
    kind = ZERO, require_tile(field), memset(&state.tiles[field], 0, sizeof(Tile));
  else if (opcode == 0x4b && prefix == 3 && with_sib) kind = LOAD, move(field, memory, stride, 0);
  else if (opcode == 0x4b && prefix == 2 && with_sib) kind = STORE, move(field, memory, stride, 1);
  else if (opcode == 0x5c && prefix == 2 && mode == 3) kind = MULTIPLY, multiply(field, low, third);
  require(kind != KINDS, "an instruction that is not known here");
  ++amx_counts[kind];
  registers[REG_RIP] = (greg_t)next;
}

void amx_emulate(void) {
  struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, NULL);
}
