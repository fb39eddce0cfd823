// kernels.cpp for another processor than the one that asks: calls come in on stdin, what they wrote goes out on
// stdout. tests/neon.py compiles this, and writes kernels.inc: ENTRY(name) for each function that kernels.cpp exports.
//
// A call is the length of a name, the name, and the arguments in the signature's order: a number as it is, a pointer
// as the number of its bytes (-1: null) and the bytes. The answer is, for each pointer, the number of bytes
// that were written to (0 where it is const), and the bytes.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <type_traits>

static void receive(void* to, size_t n) {
  if (fread(to, 1, n, stdin) != n) exit(0);  // the caller is gone
}

template <class X>
struct Argument {
  X value;
  Argument() { receive(&value, sizeof value); }
  X get() { return value; }
  void answer() {}
};

template <class X>
struct Argument<X*> {
  int64_t size;
  std::vector<char> bytes;
  Argument() {
    receive(&size, sizeof size);
    bytes.resize(std::max<int64_t>(size, 0));
    receive(bytes.data(), bytes.size());
  }
  X* get() { return size < 0 ? nullptr : (X*)bytes.data(); }
  void answer() {
    int64_t written = std::is_const_v<X> ? 0 : bytes.size();
    fwrite(&written, sizeof written, 1, stdout);
    fwrite(bytes.data(), 1, written, stdout);
  }
};

template <class... A>
static void serve(void (*kernel)(A...)) {
  std::tuple<Argument<A>...> arguments{Argument<A>()...};  // in braces, so read from left to right
  std::apply([&](auto&... each) {
    kernel(each.get()...);
    (each.answer(), ...);
  }, arguments);
  fflush(stdout);
}

#define ENTRY(name) {#name, [] { serve(name); }},
static const std::map<std::string, void (*)()> KERNELS{
#include "kernels.inc"
};

int main() {
  for (;;) {
    int64_t length;
    receive(&length, sizeof length);
    std::string name(length, ' ');
    receive(name.data(), length);
    KERNELS.at(name)();
  }
}
