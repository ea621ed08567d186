// Exceptions through frames with destructors, and virtual calls.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

static volatile unsigned long sink;

struct Guard {
    ~Guard() { sink = sink + 1; }
};

struct Shape {
    virtual ~Shape() = default;
    virtual unsigned area(unsigned n) const = 0;
};

struct Square : Shape {
    __attribute__((noinline)) unsigned area(unsigned n) const override {
        Guard guard;
        if (n % 7 == 0) throw std::runtime_error(std::to_string(n));
        return n * n;
    }
};

__attribute__((noinline)) static unsigned deep(const Shape &shape, unsigned depth, unsigned n) {
    Guard guard;
    return depth == 0 ? shape.area(n) : deep(shape, depth - 1, n) + 1;
}

int main() {
    std::vector<std::unique_ptr<Shape>> shapes;
    for (int i = 0; i < 3; i++) shapes.push_back(std::make_unique<Square>());
    for (unsigned n = 0; n < 60; n++) {
        try {
            sink = sink + deep(*shapes[n % 3], n % 9, n);
        } catch (const std::exception &error) {
            sink = sink + std::string(error.what()).size();
        }
    }
    return sink == 42;
}
