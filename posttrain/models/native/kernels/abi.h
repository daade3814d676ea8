// Structures that Python fills: declared by one list of fields, of which C exports names, offsets, sizes and kinds, so
// that the binder can compare its own declaration field by field.
//
//     #define POINT_FIELDS(FIELD) FIELD(int64_t, x) FIELD(float *, path)
//     STRUCTURE(point, POINT_FIELDS)      declares struct point and the function point_fields()
#pragma once

#include <stddef.h>
#include <stdint.h>

struct field {
    const char *name;  // NULL behind the last one, whose offset is then the size of the structure
    int64_t offset, size;
    int64_t kind;  // 'i': int64_t, 'f': float, 'p': pointer, 's': structure
};

#define FIELD_KIND(type) \
    _Generic((type *)0, int64_t *: 'i', float *: 'f', default: __builtin_classify_type(*(type *)0) == 5 ? 'p' : 's')
#define DECLARE_FIELD(type, name) type name;
#define DESCRIBE_FIELD(type, name) {#name, offsetof(described, name), sizeof(type), FIELD_KIND(type)},
#define STRUCTURE(tag, FIELDS) \
    struct tag { FIELDS(DECLARE_FIELD) }; \
    const struct field *tag##_fields(void) { \
        typedef struct tag described; \
        static const struct field fields[] = {FIELDS(DESCRIBE_FIELD){NULL, sizeof(described), 0, 0}}; \
        return fields; \
    }
