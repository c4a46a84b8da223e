// Runs one launch of an emulated kernel: threads as fibres, checks of every memory access, one finding at most.
//
// Owns scheduling (barriers, SIMD operations, divergence) and the shadow of device and threadgroup memory.
// The kernel's object calls the hooks of the thread sanitizer and of the undefined-behaviour sanitizer; they
// are defined here instead of in those libraries. The job file comes from build.py, which also reads the
// finding: one line of key=value words on standard output, exit status 3.
//
// Lanes of a SIMD group are not taken to be in step: only barriers that name a memory order accesses to it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" void k3_entry(void** buffers, const uint32_t* attributes);

namespace {
constexpr uint64_t SLOT = uint64_t(1) << 36;  // address space of a buffer; the buffer starts in its middle
constexpr size_t STACK = 128 << 10;
constexpr int WIDTH = 32;
constexpr uint32_t NOBODY = ~0u;
enum Memory { DEVICE = 0, GROUP = 1 };  // bit numbers of mem_flags
enum State { RUN, BARRIER, SIMD_BARRIER, SIMD, DONE };

// What is known of one element: its last writer, and its readers since the last barrier.
struct Cell {
  uint32_t write_group, write_thread, write_epoch, write_simd_epoch;
  uint32_t read_group, read_epoch;
  uint32_t reader[2], read_simd_epoch[2];  // the two latest different readers
  bool across_simd_groups, other_groups;
};

struct Region {
  char* start;
  uint64_t bytes;
  uint32_t cell_bytes;
  Memory memory;
  bool writable, initialised;
  Cell* cells;
};

struct Fibre {
  void* stack_pointer;
  char* stack;
  State state;
  uint64_t site;
  uint32_t operation, bits, argument, result;
  int flags;
};

std::vector<Region> regions;  // buffers first, then threadgroup arrays
size_t buffer_count;
char* slots;
void* arguments[64];
std::vector<Fibre> fibres;
void* scheduler_stack_pointer;
uint32_t current, thread_count, group_number;  // groups count from 1
uint32_t grid[3], group_size[3], group_position[3], actual_size[3];
uint32_t epochs[2];
std::vector<uint32_t> simd_epochs[2];

[[noreturn]] void finding(const char* kind, const void* pc, const char* format, ...) {
  printf("kind=%s pc=%p thread=%u group=%u ", kind, pc, current, group_number - 1);
  va_list list;
  va_start(list, format);
  vprintf(format, list);
  va_end(list);
  printf("\n");
  fflush(stdout);
  _exit(3);
}

// ---------------------------------------------------------------- fibres
extern "C" void k3_switch(void** save, void* load);
asm(R"(
.text
.globl k3_switch
k3_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void to_scheduler() { k3_switch(&fibres[current].stack_pointer, scheduler_stack_pointer); }

void fibre_main() {
  uint32_t values[32];
  const uint32_t x = current % actual_size[0], y = current / actual_size[0] % actual_size[1],
                 z = current / actual_size[0] / actual_size[1];
  const uint32_t within[3] = {x, y, z};
  for (int axis = 0; axis < 3; ++axis) {
    values[axis] = group_position[axis] * group_size[axis] + within[axis];
    values[3 + axis] = within[axis];
    values[6 + axis] = group_position[axis];
    values[9 + axis] = (grid[axis] + group_size[axis] - 1) / group_size[axis];
    values[12 + axis] = grid[axis];
    values[15 + axis] = actual_size[axis];
  }
  values[18] = current % WIDTH;
  values[19] = current / WIDTH;
  values[20] = current;
  values[21] = (thread_count + WIDTH - 1) / WIDTH;
  values[22] = WIDTH;
  k3_entry(arguments, values);
  Fibre& fibre = fibres[current];
  fibre.state = DONE;
  fibre.site = fibre.flags = fibre.operation = 0;
  to_scheduler();
}

void start_fibre(Fibre& fibre) {
  void** top = reinterpret_cast<void**>(fibre.stack + STACK - 64);
  *top = reinterpret_cast<void*>(fibre_main);  // where the first switch returns to; rsp is 8 modulo 16 there
  fibre.stack_pointer = top - 6;
  fibre.state = RUN;
}

void check_same(uint32_t first, uint32_t last, const char* what) {
  for (uint32_t n = first; n < last; ++n) {
    if (fibres[n].state != fibres[first].state || fibres[n].site != fibres[first].site ||
        fibres[n].flags != fibres[first].flags || fibres[n].operation != fibres[first].operation) {
      uint32_t waiting = fibres[first].state == DONE ? n : first;
      current = waiting == n ? first : n;
      finding("divergence", reinterpret_cast<void*>(fibres[waiting].site), "waiting=%u at=%s", waiting, what);
    }
  }
}

void resolve_simd(uint32_t first, uint32_t last) {
  const uint32_t operation = fibres[first].operation;
  float sum = 0;
  uint32_t whole = 0;
  for (uint32_t n = first; n < last; ++n) {
    const uint32_t bits = fibres[n].bits;
    float x, y;
    memcpy(&x, &bits, 4);
    memcpy(&y, &whole, 4);
    if (operation == 0) sum += x;
    if (operation == 1 && (n == first || x > y)) whole = bits;
    if (operation == 2 && (n == first || x < y)) whole = bits;
    if (operation == 3) whole += bits;
    if (operation == 4 && (n == first || bits > whole)) whole = bits;
    if (operation == 5 && (n == first || bits < whole)) whole = bits;
  }
  if (operation == 0) memcpy(&whole, &sum, 4);
  for (uint32_t n = first; n < last; ++n) {
    fibres[n].result = whole;
    if (operation >= 6) {
      const uint32_t lane = n - first, argument = fibres[n].argument;
      const uint32_t source = operation == 6   ? argument
                              : operation == 7 ? lane ^ argument
                              : operation == 8 ? lane + argument
                                               : lane - argument;
      if (source >= last - first) {
        current = n;
        finding("lane", reinterpret_cast<void*>(fibres[n].site), "lane=%u", source);
      }
      fibres[n].result = fibres[first + source].bits;
    }
    fibres[n].state = RUN;
  }
}

void run_group() {
  for (uint32_t n = 0; n < thread_count; ++n) start_fibre(fibres[n]);
  for (;;) {
    for (uint32_t first = 0; first < thread_count; first += WIDTH) {
      const uint32_t last = first + WIDTH < thread_count ? first + WIDTH : thread_count;
      for (;;) {
        for (current = first; current < last; ++current) {
          if (fibres[current].state == RUN) k3_switch(&scheduler_stack_pointer, fibres[current].stack_pointer);
        }
        bool simd = false, simd_barrier = false;
        for (uint32_t n = first; n < last; ++n) {
          simd |= fibres[n].state == SIMD;
          simd_barrier |= fibres[n].state == SIMD_BARRIER;
        }
        if (!simd && !simd_barrier) break;
        check_same(first, last, simd ? "simd" : "simdgroup_barrier");
        if (simd) {
          resolve_simd(first, last);
        } else {
          for (int memory = 0; memory < 2; ++memory)
            simd_epochs[memory][first / WIDTH] += fibres[first].flags >> memory & 1;
          for (uint32_t n = first; n < last; ++n) fibres[n].state = RUN;
        }
      }
    }
    check_same(0, thread_count, "threadgroup_barrier");
    if (fibres[0].state == DONE) return;
    for (int memory = 0; memory < 2; ++memory) epochs[memory] += fibres[0].flags >> memory & 1;
    for (uint32_t n = 0; n < thread_count; ++n) fibres[n].state = RUN;
  }
}

// ---------------------------------------------------------------- memory
void access_cell(Region& region, uint64_t index, bool write, const void* pc) {
  Cell& cell = region.cells[index];
  const Memory memory = region.memory;
  const uint32_t simd = current / WIDTH, epoch = epochs[memory], simd_epoch = simd_epochs[memory][simd];
  const size_t name = &region - regions.data();
  auto ordered = [&](uint32_t thread, uint32_t then) {
    return thread == current || (thread / WIDTH == simd && then < simd_epoch);
  };
  auto race = [&](uint32_t thread) {
    finding("race", pc, "region=%zu index=%llu other=%d", name, (unsigned long long)index, (int)thread);
  };
  const bool written_here = cell.write_group == group_number;
  if (memory == DEVICE && cell.write_group && !written_here) race(NOBODY);
  if (written_here && cell.write_epoch == epoch && !ordered(cell.write_thread, cell.write_simd_epoch))
    race(cell.write_thread);
  if (!write) {
    if (!written_here && !(memory == DEVICE && region.initialised))
      finding("uninitialised", pc, "region=%zu index=%llu", name, (unsigned long long)index);
    if (cell.read_group != group_number || cell.read_epoch != epoch) {
      cell.other_groups |= memory == DEVICE && cell.read_group && cell.read_group != group_number;
      cell.read_group = group_number;
      cell.read_epoch = epoch;
      cell.reader[0] = current;
      cell.reader[1] = NOBODY;
      cell.across_simd_groups = false;
    } else if (cell.reader[0] != current) {
      cell.across_simd_groups |= cell.reader[0] / WIDTH != simd;
      cell.reader[1] = cell.reader[0];
      cell.read_simd_epoch[1] = cell.read_simd_epoch[0];
      cell.reader[0] = current;
    }
    cell.read_simd_epoch[0] = simd_epoch;
    return;
  }
  if (memory == DEVICE && (cell.other_groups || (cell.read_group && cell.read_group != group_number))) race(NOBODY);
  if (cell.read_group == group_number && cell.read_epoch == epoch) {
    if (cell.across_simd_groups) race(cell.reader[0] != current ? cell.reader[0] : cell.reader[1]);
    for (int n = 0; n < 2; ++n)
      if (cell.reader[n] != NOBODY && !ordered(cell.reader[n], cell.read_simd_epoch[n])) race(cell.reader[n]);
  }
  cell.write_group = group_number;
  cell.write_thread = current;
  cell.write_epoch = epoch;
  cell.write_simd_epoch = simd_epoch;
}

extern "C" char __executable_start, end;

void access(const void* pointer, uint64_t bytes, bool write, const void* pc) {
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  if (address >= fibres[current].stack && address < fibres[current].stack + STACK) return;
  if (pointer >= arguments && pointer < arguments + 64) return;  // the entry unpacks them
  Region* region = nullptr;
  if (address >= slots && address < slots + SLOT * buffer_count) {
    region = &regions[(address - slots) / SLOT];
  } else {
    for (size_t n = buffer_count; n < regions.size(); ++n)
      if (address >= regions[n].start && address < regions[n].start + (regions[n].bytes | 65535) + 1) region = &regions[n];
  }
  if (!region) {
    if (!write && address >= &__executable_start && address < &end) return;  // a table of constants
    finding("bounds", pc, "address=%p", pointer);
  }
  const size_t name = region - regions.data();
  const int64_t offset = address - region->start;
  const int64_t index = offset < 0 ? -((-offset + region->cell_bytes - 1) / region->cell_bytes) : offset / region->cell_bytes;
  if (offset < 0 || offset + bytes > region->bytes)
    finding("bounds", pc, "region=%zu index=%lld", name, (long long)index);
  if (reinterpret_cast<uint64_t>(address) % (bytes > 8 ? 8 : bytes))
    finding("alignment", pc, "region=%zu index=%lld", name, (long long)index);
  if (write && !region->writable) finding("input", pc, "region=%zu index=%lld", name, (long long)index);
  if (!region->cells) return;
  for (uint64_t cell = index; cell * region->cell_bytes < offset + bytes; ++cell) access_cell(*region, cell, write, pc);
}
}  // namespace

// ---------------------------------------------------------------- what kernels call
extern "C" {
void k3_emulator_barrier(int simdgroup_only, int flags) {
  Fibre& fibre = fibres[current];
  fibre.state = simdgroup_only ? SIMD_BARRIER : BARRIER;
  fibre.site = reinterpret_cast<uint64_t>(__builtin_return_address(0));
  fibre.flags = flags;
  fibre.operation = 0;
  to_scheduler();
}

uint32_t k3_emulator_simd(int operation, uint32_t bits, uint32_t argument) {
  Fibre& fibre = fibres[current];
  fibre.state = SIMD;
  fibre.site = reinterpret_cast<uint64_t>(__builtin_return_address(0));
  fibre.operation = operation;
  fibre.bits = bits;
  fibre.argument = argument;
  fibre.flags = 0;
  to_scheduler();
  return fibres[current].result;
}

#define HOOK(N)                                                                                          \
  void __tsan_read##N(void* p) { access(p, N, false, __builtin_return_address(0)); }                     \
  void __tsan_write##N(void* p) { access(p, N, true, __builtin_return_address(0)); }                     \
  void __tsan_unaligned_read##N(void* p) { access(p, N, false, __builtin_return_address(0)); }           \
  void __tsan_unaligned_write##N(void* p) { access(p, N, true, __builtin_return_address(0)); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { access(p, n, true, __builtin_return_address(0)); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

struct Location {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(NAME, KIND)                                                                      \
  void __ubsan_handle_##NAME(Location* at, ...) {                                                  \
    finding(KIND, __builtin_return_address(0), "file=%s line=%u", at->file, at->line);             \
  }
struct ArrayType {
  uint16_t kind, information;
  char name[1];
};
// The array of a bad index has no name here, only a type.
void __ubsan_handle_out_of_bounds(Location* at, uint64_t index) {
  const ArrayType* type = *reinterpret_cast<ArrayType**>(at + 1);
  char name[64] = {};
  for (size_t n = 0, m = 0; type->name[n] && m < sizeof name - 1; ++n)
    if (type->name[n] != ' ' && type->name[n] != 0x27) name[m++] = type->name[n];
  finding("bounds", __builtin_return_address(0), "buffer=%s index=%d file=%s line=%u", name, (int)index, at->file,
          at->line);
}
UNDEFINED(type_mismatch_v1, "alignment")
UNDEFINED(add_overflow, "overflow")
UNDEFINED(sub_overflow, "overflow")
UNDEFINED(mul_overflow, "overflow")
UNDEFINED(negate_overflow, "overflow")
UNDEFINED(divrem_overflow, "overflow")
UNDEFINED(shift_out_of_bounds, "overflow")
UNDEFINED(float_cast_overflow, "overflow")
UNDEFINED(vla_bound_not_positive, "bounds")
UNDEFINED(missing_return, "overflow")
}

// ---------------------------------------------------------------- job file
namespace {
FILE* job;
template <typename T>
T take() {
  T value;
  if (fread(&value, sizeof value, 1, job) != 1) exit(2);
  return value;
}
}  // namespace

int main(int, char** argv) {
  job = fopen(argv[1], "rb");
  if (!job) return 2;
  for (auto& n : grid) n = take<uint32_t>();
  for (auto& n : group_size) n = take<uint32_t>();
  buffer_count = take<uint32_t>();
  const uint32_t arrays = take<uint32_t>();
  if (buffer_count > sizeof arguments / sizeof *arguments) return 2;
  slots = static_cast<char*>(mmap(nullptr, SLOT * (buffer_count + 1), PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (slots == MAP_FAILED) return 2;
  for (size_t n = 0; n < buffer_count; ++n) {
    Region region = {};
    region.bytes = take<uint64_t>();
    region.cell_bytes = take<uint32_t>();
    const uint32_t kind = take<uint32_t>();  // 0 input, 1 output, 2 output with an initial value
    region.memory = DEVICE;
    region.writable = kind != 0;
    region.initialised = kind != 1;
    region.start = slots + SLOT * n + SLOT / 2;
    if (mprotect(region.start, region.bytes + 4096, PROT_READ | PROT_WRITE)) return 2;
    if (fread(region.start, 1, region.bytes, job) != region.bytes) return 2;
    if (kind) region.cells = static_cast<Cell*>(calloc(region.bytes / region.cell_bytes + 1, sizeof(Cell)));
    regions.push_back(region);
    arguments[n] = region.start;
  }
  for (uint32_t n = 0; n < arrays; ++n) {
    Region region = {};
    region.start = reinterpret_cast<char*>(take<uint64_t>());
    region.bytes = take<uint64_t>();
    region.cell_bytes = take<uint32_t>();
    region.memory = GROUP;
    region.writable = true;
    region.cells = static_cast<Cell*>(calloc(region.bytes / region.cell_bytes + 1, sizeof(Cell)));
    regions.push_back(region);
  }
  fclose(job);

  const uint32_t most = group_size[0] * group_size[1] * group_size[2];
  fibres.resize(most);
  char* stacks = static_cast<char*>(mmap(nullptr, STACK * most, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) return 2;
  for (uint32_t n = 0; n < most; ++n) fibres[n].stack = stacks + STACK * n;
  for (auto& epoch : simd_epochs) epoch.assign(most / WIDTH + 1, 1);

  uint32_t groups[3];
  for (int axis = 0; axis < 3; ++axis) groups[axis] = (grid[axis] + group_size[axis] - 1) / group_size[axis];
  for (group_position[2] = 0; group_position[2] < groups[2]; ++group_position[2])
    for (group_position[1] = 0; group_position[1] < groups[1]; ++group_position[1])
      for (group_position[0] = 0; group_position[0] < groups[0]; ++group_position[0]) {
        thread_count = 1;
        for (int axis = 0; axis < 3; ++axis) {
          const uint32_t left = grid[axis] - group_position[axis] * group_size[axis];
          actual_size[axis] = left < group_size[axis] ? left : group_size[axis];
          thread_count *= actual_size[axis];
        }
        ++group_number;
        ++epochs[DEVICE];
        ++epochs[GROUP];
        run_group();
      }

  current = 0;
  const bool checked = argv[3][0] == '1';
  FILE* result = fopen(argv[2], "wb");
  if (!result) return 2;
  for (size_t n = 0; n < buffer_count; ++n) {
    Region& region = regions[n];
    if (!region.writable) continue;
    for (uint64_t cell = 0; checked && !region.initialised && cell < region.bytes / region.cell_bytes; ++cell)
      if (!region.cells[cell].write_group) finding("unwritten", nullptr, "region=%zu index=%llu", n, (unsigned long long)cell);
    if (fwrite(region.start, 1, region.bytes, result) != region.bytes) return 2;
  }
  return fclose(result) ? 2 : 0;
}
