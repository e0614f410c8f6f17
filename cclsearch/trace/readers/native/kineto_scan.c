/* Scans a piece of Kineto's JSON (a list of events) straight into columns.
 *
 * A plain C library without Python.h, called through ctypes by `readers/kineto/scanner.py`, so that one build serves every
 * Python of a platform. It must give exactly what the Python way (`json_events.py`, `kineto_spans.py`) gives. It
 * therefore accepts a piece only if every event in it is plain: what strict and lenient parsers read alike. For anything
 * else (a number with an exponent, an escaped key, a key twice, broken UTF-8, deep nesting, an unknown phase, ...) it
 * refuses the whole piece, and the caller reads that piece in Python. A refusal costs time and never changes a result.
 *
 * No byte outside [text, text + the last of `stops`) is read, and nothing is written beyond `capacity` entries of an output array.
 * `make fuzz-native` runs it with the address and undefined-behaviour sanitizers.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum { VERSION = 8 };
enum { ACCEPTED = 0, REFUSED = 1, NO_MEMORY = 2 };
enum { NAMES, THREADS, GRIDS, SHAPES, CALLS, CATEGORIES, NUM_TABLES };
enum { MAX_DEPTH = 60, MAX_CATEGORIES = 1000 };

typedef uint8_t u8;
typedef const u8 *Text;
typedef unsigned __int128 u128;

typedef struct {
    Text start;
    int64_t size; /* 0: absent */
} Span;

/* ---- interning: texts numbered in the order of first use ---- */

typedef struct {
    uint64_t hash;
    size_t start; /* in `bytes` */
    int32_t size;
    u8 flag; /* of a name: SHAPED..., of a category: HOST..., of a call: whether its arguments are in `texts` */
    u8 kind; /* of a category; 0 is dropped */
    uint32_t seen; /* number of the last block in which an event had this category */
    uint32_t accepted; /* the same, of the blocks that were accepted; 0: in none */
} Entry;

typedef struct {
    Entry *entries;
    int32_t *slots; /* -1: free; always less than half full */
    u8 *bytes;
    size_t used, room;
    int32_t count, room_entries, mask;
} Table;

typedef struct {
    Table tables[NUM_TABLES];
    struct Step *steps; /* see "layouts of events" */
    int32_t num_steps, lessons;
    uint64_t seed;
    u8 *key; /* text of a composed key */
    size_t key_room;
    Table texts; /* only `bytes`: the text of names of processes and threads, and of the first event with each call */
    uint32_t block, first_block; /* numbers of the present block, and of the first one of this call */
    int32_t last_thread[2]; /* of a row of the host and of a device; -1: none */
    u8 on_device[256]; /* whether rows of a kind are on a device */
    int odd_ids; /* 1: an id below -1, 2: an id beyond 31 bits */
    int no_memory;
} Scanner;

/* ---- one call: see `_Piece` in scanner.py, which mirrors this structure ---- */

typedef struct {
    Text text;
    Text time_prefix; /* `"ts": 1712`: leading digits that are read as one digit 1 */
    int64_t time_prefix_size;
    double time_offset_us; /* subtracted from times above LONG_TIME_US */
    int64_t capacity;
    int64_t base_us, has_base;
    Text kept; /* `texts` of the scanner, until it scans again */
    int64_t events, rows, sizes, blocks, externals, grids, shaped, calls, firsts, metas, points, bad;
    int64_t *ts_ns, *dur_ns;
    u8 *kind;
    int32_t *name, *thread, *stream, *corr;
    int16_t *device;
    int32_t *size_row, *block_row, *external_row, *grid_row; /* rows on a device that state these */
    int64_t *size_bytes;
    double *block_per_sm;
    int64_t *external_id;
    int32_t *grid_key;
    int32_t *shaped_row, *shaped_key;
    int64_t *shaped_ext;
    int32_t *call_row, *call_key;
    int32_t *first_key, *first_name; /* first events with a call: number of call and name, and arguments in `kept` */
    int64_t *first_start, *first_size;
    int64_t *meta_start, *meta_size; /* whole events in `kept` */
    double *point_us;
    int64_t *point_allocated, *point_reserved;
    int16_t *point_device;
} Piece;

/* ---- arguments ---- */

enum {
    EXT, OLD_EXT, DEVICE, STREAM, CORR, BYTES, REGISTERS, SHARED, DEVICE_TYPE, DEVICE_ID, ALLOCATED, RESERVED, NUM_INTS,
    BLOCKS = NUM_INTS, GRID, BLOCK, SCALARS, DTYPES, DIMS,
    CALL_NAME, CALL_FIRST = CALL_NAME, IN_NELEMS, OUT_NELEMS, GROUP_SIZE, DTYPE, IN_SPLIT, OUT_SPLIT, GROUP_NAME,
    GROUP_RANKS, SRC_RANK, DST_RANK, NUM_FIELDS
};

#define BIT(field) (1u << (field))
#define FIELD(text, field) {text, sizeof(text) - 1, field}

static const struct {
    const char *name;
    int size, field;
} FIELDS[] = {
    FIELD("grid", GRID), FIELD("block", BLOCK), FIELD("bytes", BYTES), FIELD("dtype", DTYPE),
    FIELD("device", DEVICE), FIELD("stream", STREAM),
    FIELD("Src Rank", SRC_RANK), FIELD("Dst Rank", DST_RANK), FIELD("Device Id", DEVICE_ID),
    FIELD("Input Dims", DIMS), FIELD("Input type", DTYPES), FIELD("Group size", GROUP_SIZE),
    FIELD("External id", EXT), FIELD("correlation", CORR), FIELD("external id", OLD_EXT),
    FIELD("Device Type", DEVICE_TYPE),
    FIELD("blocks per SM", BLOCKS), FIELD("shared memory", SHARED), FIELD("In msg nelems", IN_NELEMS),
    FIELD("In split size", IN_SPLIT), FIELD("Out msg nelems", OUT_NELEMS), FIELD("Out split size", OUT_SPLIT),
    FIELD("Total Reserved", RESERVED), FIELD("Total Allocated", ALLOCATED), FIELD("Collective name", CALL_NAME),
    FIELD("Concrete Inputs", SCALARS), FIELD("Process Group Name", GROUP_NAME),
    FIELD("Process Group Ranks", GROUP_RANKS), FIELD("registers per thread", REGISTERS),
};
enum { NUM_NAMED = sizeof(FIELDS) / sizeof(FIELDS[0]), MAX_FIELD_SIZE = 20 };
/* Index in FIELDS, which is sorted by size, of the first key of each size. */
static const u8 FIRST_OF_SIZE[MAX_FIELD_SIZE + 2] = {
    0, 0, 0, 0, 0, 1, 4, 6, 6, 8, 9, 12, 16, 16, 20, 23, 26, 26, 26, 27, 28, NUM_NAMED};

#define CALL_FIELDS (BIT(NUM_FIELDS) - BIT(CALL_FIRST))
#define RUNTIME_FIELDS BIT(CORR)
#define DEVICE_FIELDS (BIT(EXT) | BIT(OLD_EXT) | BIT(DEVICE) | BIT(STREAM) | BIT(CORR) | BIT(BYTES) | BIT(REGISTERS) \
    | BIT(SHARED) | BIT(BLOCKS) | BIT(GRID) | BIT(BLOCK) | CALL_FIELDS)
#define SHAPE_FIELDS (BIT(EXT) | BIT(OLD_EXT) | BIT(SCALARS) | BIT(DTYPES) | BIT(DIMS))
#define MEMORY_FIELDS (BIT(DEVICE_TYPE) | BIT(DEVICE_ID) | BIT(ALLOCATED) | BIT(RESERVED))

enum { HOST = 0, RUNTIME = 1, ON_DEVICE = 2 }; /* `flag` of a category: which arguments its rows need */
enum { NOT_SHAPED = 0, SHAPED = 1, SHAPED_UNKNOWN = 2 }; /* `flag` of a name */

typedef struct {
    unsigned has; /* fields that are present; the others below are undefined */
    int64_t number[NUM_INTS];
    double blocks;
    Span raw[NUM_FIELDS];
} Args;

static inline int64_t number_of(const Args *args, int field) {
    return args->has & BIT(field) ? args->number[field] : field == DEVICE_TYPE ? 0 : -1;
}

static inline Span text_of(const Args *args, int field) {
    return args->has & BIT(field) ? args->raw[field] : (Span){NULL, 0};
}

static uint64_t load64(Text p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

/* ---- lexing: every function returns the position after what it read, or NULL to refuse ---- */

static inline Text skip_space(Text p, Text end) {
    while (p < end && *p <= ' ' && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

/* One character of two to four bytes (RFC 3629: shortest form, no surrogates, up to U+10FFFF). */
static Text skip_utf8(Text p, Text end) {
    int64_t left = end - p;
    u8 a = p[0];
    if (a >= 0xC2 && a <= 0xDF) return left >= 2 && (p[1] & 0xC0) == 0x80 ? p + 2 : NULL;
    if ((a & 0xF0) == 0xE0) {
        if (left < 3 || (p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80) return NULL;
        return (a == 0xE0 && p[1] < 0xA0) || (a == 0xED && p[1] > 0x9F) ? NULL : p + 3;
    }
    if (a < 0xF0 || a > 0xF4 || left < 4) return NULL;
    if ((p[1] & 0xC0) != 0x80 || (p[2] & 0xC0) != 0x80 || (p[3] & 0xC0) != 0x80) return NULL;
    return (a == 0xF0 && p[1] < 0x90) || (a == 0xF4 && p[1] > 0x8F) ? NULL : p + 4;
}

static Text skip_escape(Text p, Text end) {
    static const char HEX[] = "0123456789abcdefABCDEF";
    if (end - p < 2) return NULL;
    if (p[1] != 'u') return p[1] && strchr("\"\\/bfnrt", p[1]) ? p + 2 : NULL;
    if (end - p < 6) return NULL;
    for (int i = 2; i < 6; i++)
        if (!p[i] || !strchr(HEX, p[i])) return NULL;
    return p + 6;
}

/* Skips bytes that need no look: neither quote, backslash, control character nor beyond ASCII. */
static inline Text skip_plain(Text p, Text end) {
#if defined(__SSE2__)
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), space = _mm_set1_epi8(' ');
    while (end - p >= 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)p);
        __m128i odd = _mm_or_si128(_mm_cmpeq_epi8(v, quote), _mm_cmpeq_epi8(v, slash));
        int found = _mm_movemask_epi8(_mm_or_si128(odd, _mm_cmplt_epi8(v, space))); /* signed: includes >= 0x80 */
        if (found) return p + __builtin_ctz((unsigned)found);
        p += 16;
    }
#else
    const uint64_t ones = 0x0101010101010101u, high = 0x8080808080808080u;
    while (end - p >= 8) {
        uint64_t v = load64(p), quote = v ^ (ones * '"'), slash = v ^ (ones * '\\');
        if (((v - ones * ' ') | (quote - ones) | (slash - ones) | v) & high) break; /* may be a false alarm */
        p += 8;
    }
#endif
    while (p < end && *p >= ' ' && *p < 0x80 && *p != '"' && *p != '\\') p++;
    return p;
}

/* `p` follows the opening quote; returns the position of the closing quote. */
static inline Text find_quote(Text p, Text end, int *escaped) {
    for (;;) {
        p = skip_plain(p, end);
        if (UNLIKELY(p >= end)) return NULL;
        if (LIKELY(*p == '"')) return p;
        if (*p == '\\') {
            *escaped = 1;
            p = skip_escape(p, end);
        } else {
            p = *p < ' ' ? NULL : skip_utf8(p, end);
        }
        if (!p) return NULL;
    }
}

static inline int is_digit(u8 c) { return (u8)(c - '0') <= 9; }

static Text skip_number(Text p, Text end) {
    if (p < end && *p == '-') p++;
    if (p >= end || !is_digit(*p)) return NULL;
    if (*p == '0') p++;
    else while (p < end && is_digit(*p)) p++;
    if (p < end && *p == '.') {
        if (++p >= end || !is_digit(*p)) return NULL;
        while (p < end && is_digit(*p)) p++;
    }
    if (p < end && (*p | 32) == 'e') {
        if (++p < end && (*p == '+' || *p == '-')) p++;
        if (p >= end || !is_digit(*p)) return NULL;
        while (p < end && is_digit(*p)) p++;
    }
    return p;
}

static Text skip_word(Text p, Text end, const char *word, int size) {
    return end - p >= size && !memcmp(p, word, (size_t)size) ? p + size : NULL;
}

static Text skip_scalar(Text p, Text end) {
    int escaped = 0;
    switch (*p) {
    case '"': return (p = find_quote(p + 1, end, &escaped)) ? p + 1 : NULL;
    case 't': return skip_word(p, end, "true", 4);
    case 'f': return skip_word(p, end, "false", 5);
    case 'n': return skip_word(p, end, "null", 4);
    default: return skip_number(p, end);
    }
}

/* A value that is missing, or not a number in any spelling (`-nan(ind)`, `inf`): Python's way leaves it out too. */
static Text skip_broken(Text p, Text end) {
    if (p >= end || *p == ',' || *p == '}') return p < end ? p : NULL;
    if (*p == '-' || *p == '+') p++;
    if (end - p < 4 || ((p[0] | 32) != 'n' && (p[0] | 32) != 'i') || ((p[1] | 32) != 'a' && (p[1] | 32) != 'n')) return NULL;
    if (memcmp(p, "nan", 3) && memcmp(p, "NaN", 3) && memcmp(p, "inf", 3) && memcmp(p, "Inf", 3)) return NULL;
    for (; p < end && *p != ',' && *p != '}'; p++)
        if (*p <= ' ' || *p >= 0x7F || strchr("\"[]{:\\", *p)) break;
    return p;
}

/* `p` is at the key's quote; returns the position of the value. */
static inline Text skip_key(Text p, Text end, Span *key) {
    int escaped = 0;
    if (UNLIKELY(p >= end || *p != '"')) return NULL;
    Text quote = find_quote(p + 1, end, &escaped);
    if (UNLIKELY(!quote || escaped)) return NULL;
    key->start = p + 1;
    key->size = quote - p - 1;
    p = quote + 1;
    if (UNLIKELY(p < end && *p <= ' ')) p = skip_space(p, end);
    if (UNLIKELY(p >= end || *p != ':')) return NULL;
    p++;
    if (LIKELY(p < end && *p == ' ')) p++;
    if (UNLIKELY(p < end && *p <= ' ')) p = skip_space(p, end);
    return p < end ? p : NULL;
}

/* Any value of a member, also a broken one. The containers around `p` are bits of `objects`: 1 is an object, 0 a list. */
static Text skip_value(Text p, Text end) {
    uint64_t objects = 0;
    int depth = 0;
    Span key;
    for (;;) {
        if (UNLIKELY(p >= end)) return NULL;
        if (*p == '{' || *p == '[') {
            if (++depth > MAX_DEPTH) return NULL;
            u8 close = *p == '{' ? '}' : ']';
            objects = objects << 1 | (close == '}');
            p = skip_space(p + 1, end);
            if (UNLIKELY(p >= end)) return NULL;
            if (*p != close) {
                if (close == '}' && !(p = skip_key(p, end, &key))) return NULL;
                continue;
            }
            objects >>= 1; /* empty: `p` is at its closing bracket */
            depth--;
        } else {
            Text start = p;
            if (!(p = skip_scalar(start, end)) && (depth && !(objects & 1))) return NULL;
            if (UNLIKELY(!p) && !(p = skip_broken(start, end))) return NULL;
            p--; /* the last byte of the scalar */
        }
        for (p++;; p++) { /* after a value: a comma, or the brackets that close the containers around it */
            if (!depth) return p;
            p = skip_space(p, end);
            if (UNLIKELY(p >= end)) return NULL;
            if (*p == ',') {
                p = skip_space(p + 1, end);
                if (objects & 1 && !(p = skip_key(p, end, &key))) return NULL;
                break;
            }
            if (*p != (objects & 1 ? '}' : ']')) return NULL;
            objects >>= 1;
            depth--;
        }
    }
}

/* A whole number of up to 18 digits, also in quotes. */
static Text read_int(Text p, Text end, int64_t *value, Span *raw) {
    int quoted = *p == '"', negative;
    if (quoted) p++;
    raw->start = p;
    negative = p < end && *p == '-';
    if (negative) p++;
    Text first = p;
    uint64_t number = 0;
    while (p < end && is_digit(*p) && p - first < 19) number = number * 10 + (uint64_t)(*p++ - '0');
    if (p == first || p - first > 18 || (*first == '0' && (p - first > 1 || negative))) return NULL;
    raw->size = p - raw->start;
    if (p >= end) return NULL;
    if (quoted) {
        if (*p != '"') return NULL;
        p++;
    } else if (*p == '.' || (*p | 32) == 'e') {
        return NULL;
    }
    *value = negative ? -(int64_t)number : (int64_t)number;
    return p;
}

/* digits / 10^places, correctly rounded; digits > 2^53, places <= 19. */
static double divide(uint64_t digits, int places) {
    static const uint64_t POWERS[] = {
        1u, 10u, 100u, 1000u, 10000u, 100000u, 1000000u, 10000000u, 100000000u, 1000000000u, 10000000000u,
        100000000000u, 1000000000000u, 10000000000000u, 100000000000000u, 1000000000000000u, 10000000000000000u,
        100000000000000000u, 1000000000000000000u, 10000000000000000000u};
    int shift = __builtin_clzll(digits);
    u128 dividend = (u128)(digits << shift) << 64;
    u128 quotient = dividend / POWERS[places];
    int rest = dividend % POWERS[places] != 0;
    int bits = quotient >> 64 ? 128 - __builtin_clzll((uint64_t)(quotient >> 64)) : 64 - __builtin_clzll((uint64_t)quotient);
    int drop = bits - 53;
    uint64_t kept = (uint64_t)(quotient >> drop);
    u128 low = quotient & (((u128)1 << drop) - 1), half = (u128)1 << (drop - 1);
    if (low > half || (low == half && (rest || kept & 1))) kept++;
    double value = (double)kept;
    for (int exponent = drop - 64 - shift; exponent > 0; exponent--) value *= 2; /* exact: no overflow in this range */
    for (int exponent = drop - 64 - shift; exponent < 0; exponent++) value *= 0.5;
    return value;
}

/* A number without exponent, of up to 19 digits; `digits` and `count` may hold digits that were read before. */
static inline Text read_decimal(Text p, Text end, uint64_t digits, int count, double *value) {
    static const double POWERS[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
        1e16, 1e17, 1e18, 1e19};
    int negative = 0, places = 0;
    if (!count) {
        if (p < end && *p == '-') negative = 1, p++;
        if (p >= end || !is_digit(*p)) return NULL;
        if (*p == '0' && p + 1 < end && is_digit(p[1])) return NULL;
    }
    while (p < end && is_digit(*p)) {
        if (++count > 19) return NULL;
        digits = digits * 10 + (uint64_t)(*p++ - '0');
    }
    if (p < end && *p == '.') {
        Text point = ++p;
        while (p < end && is_digit(*p)) {
            if (++count > 19) return NULL;
            digits = digits * 10 + (uint64_t)(*p++ - '0');
        }
        places = (int)(p - point);
        if (!places) return NULL;
    }
    if (p >= end || (*p | 32) == 'e') return NULL;
    double number = digits <= (uint64_t)1 << 53 ? (double)digits / POWERS[places] : divide(digits, places);
    *value = negative ? -number : number;
    return p;
}

/* ---- interning ---- */

static uint64_t mix(uint64_t a, uint64_t b) {
    u128 product = (u128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_text(uint64_t seed, Text p, size_t size) {
    uint64_t hash = seed ^ size * 0x9E3779B97F4A7C15u, a = 0;
    for (; size >= 8; p += 8, size -= 8) hash = mix(hash ^ load64(p), 0xA0761D6478BD642Fu);
    if (size) memcpy(&a, p, size);
    return mix(hash ^ a, 0xE7037ED1A0B428DBu ^ seed);
}

static int grow(Table *table) {
    int32_t slots = table->mask ? 2 * (table->mask + 1) : 256;
    if (table->mask >= 1 << 29) return 0;
    int32_t *new_slots = malloc((size_t)slots * sizeof *new_slots);
    Entry *entries = realloc(table->entries, (size_t)slots / 2 * sizeof *entries);
    if (entries) table->entries = entries;
    if (!new_slots || !entries) {
        free(new_slots);
        return 0;
    }
    free(table->slots);
    table->slots = new_slots;
    table->mask = slots - 1;
    table->room_entries = slots / 2;
    memset(new_slots, 0xFF, (size_t)slots * sizeof *new_slots);
    for (int32_t id = 0; id < table->count; id++) {
        uint64_t place = entries[id].hash & (uint64_t)table->mask;
        while (new_slots[place] >= 0) place = (place + 1) & (uint64_t)table->mask;
        new_slots[place] = id;
    }
    return 1;
}

static int32_t find_at(const Table *table, uint64_t hash, Text start, int64_t size, uint64_t *place) {
    for (int32_t id; (id = table->slots[*place]) >= 0; *place = (*place + 1) & (uint64_t)table->mask) {
        const Entry *entry = &table->entries[id];
        if (entry->hash == hash && entry->size == size && !memcmp(table->bytes + entry->start, start, (size_t)size)) return id;
    }
    return -1;
}

static int keep_bytes(Table *table, Text start, size_t size) {
    if (!table->bytes || table->room - table->used < size) {
        size_t room = 2 * table->room + size + 4096;
        u8 *bytes = realloc(table->bytes, room);
        if (!bytes) return 0;
        table->bytes = bytes;
        table->room = room;
    }
    memcpy(table->bytes + table->used, start, size);
    table->used += size;
    return 1;
}

/* Returns the number of the text; -1 if it is new and the table has `limit` texts, or without memory. */
static int32_t intern(Scanner *scanner, int which, Text start, int64_t size, int32_t limit) {
    Table *table = &scanner->tables[which];
    if (UNLIKELY(size > INT32_MAX || (table->count == table->room_entries && !grow(table)))) return scanner->no_memory = 1, -1;
    uint64_t hash = hash_text(scanner->seed, start, (size_t)size), place = hash & (uint64_t)table->mask;
    int32_t id = find_at(table, hash, start, size, &place);
    if (LIKELY(id >= 0) || table->count >= limit) return id;
    Entry entry = {hash, table->used, (int32_t)size, which == NAMES ? SHAPED_UNKNOWN : 0, 0, 0, 0};
    if (!keep_bytes(table, start, (size_t)size)) return scanner->no_memory = 1, -1;
    table->entries[table->count] = entry;
    table->slots[place] = table->count;
    return table->count++;
}

/* Interns the parts, each followed by a NUL (which no JSON value contains). */
static int32_t intern_parts(Scanner *scanner, int which, const Span *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++) size += (size_t)parts[i].size + 1;
    if (size > scanner->key_room) {
        u8 *key = realloc(scanner->key, 2 * size);
        if (!key) return scanner->no_memory = 1, -1;
        scanner->key = key;
        scanner->key_room = 2 * size;
    }
    u8 *to = scanner->key;
    for (int i = 0; i < count; i++) {
        if (parts[i].size) memcpy(to, parts[i].start, (size_t)parts[i].size);
        to += parts[i].size;
        *to++ = 0;
    }
    return intern(scanner, which, scanner->key, (int64_t)size, INT32_MAX);
}

/* ---- arguments ---- */

static inline int field_of(Span key, unsigned wanted) {
    if (key.size > MAX_FIELD_SIZE) return -1;
    for (int i = FIRST_OF_SIZE[key.size]; i < FIRST_OF_SIZE[key.size + 1]; i++)
        if (!memcmp(FIELDS[i].name, key.start, (size_t)key.size))
            return wanted & BIT(FIELDS[i].field) ? FIELDS[i].field : -1;
    return -1;
}

static Text read_field(Text p, Text end, int field, Args *args) {
    Span *raw = &args->raw[field];
    args->has &= ~BIT(field);
    if (UNLIKELY(!is_digit(*p) && *p != '"' && *p != '[')) {
        Text next = skip_broken(p, end);
        if (next) return field <= BLOCKS ? next : NULL;
    }
    if (*p == 'n' && (field == REGISTERS || field == SHARED || field == CALL_NAME)) return skip_word(p, end, "null", 4);
    args->has |= BIT(field);
    if (field < NUM_INTS) return read_int(p, end, &args->number[field], raw);
    if (field == BLOCKS) return read_decimal(p, end, 0, 0, &args->blocks);
    if (field == CALL_NAME && *p != '"') return NULL;
    raw->start = p;
    p = skip_value(p, end);
    raw->size = p ? p - raw->start : 0;
    return p && memchr(raw->start, '{', (size_t)raw->size) ? NULL : p; /* an object may hold a time to shorten */
}

/* Reads the wanted fields of the object at `p`; of a key that occurs twice the last value counts, as in JSON parsers. */
static Text read_args(Text p, Text end, unsigned wanted, Args *args) {
    Span key;
    args->has = 0;
    if (!wanted) return skip_value(p, end);
    p = skip_space(p + 1, end);
    if (p < end && *p == '}') return p + 1;
    for (;;) {
        if (!(p = skip_key(p, end, &key))) return NULL;
        int field = field_of(key, wanted);
        p = field < 0 ? skip_value(p, end) : read_field(p, end, field, args);
        if (!p || (p = skip_space(p, end)) >= end) return NULL;
        if (*p == '}') return p + 1;
        if (*p != ',') return NULL;
        p = skip_space(p + 1, end);
    }
}

/* ---- events ---- */

enum { PH = 1, CAT = 2, NAME = 4, TID = 8, TS = 16, DUR = 32, ARGS = 64, PID = 128 };

typedef struct {
    Text start; /* its opening brace */
    unsigned seen; /* PH, CAT, ... */
    u8 phase;
    int name_escaped, args_read;
    int32_t category, name_id; /* -1: not interned */
    unsigned wanted; /* fields that were read into `args` */
    Span name, pid, tid, args_text;
    double ts, dur;
    Args args;
} Event;

static const Span ZERO_ID = {(Text) "0", 1};
static const char MEMORY_EVENT[] = "[memory]";
static const double LONG_TIME_US = 2e12, MAX_TIME_US = 4.5e15;

static int is_memory_event(const Event *event) {
    return event->name.size == sizeof MEMORY_EVENT - 1 && !memcmp(event->name.start, MEMORY_EVENT, sizeof MEMORY_EVENT - 1);
}

/* Whether a kept row comes of it, as far as phase and category say. */
static int is_row(const Scanner *scanner, const Event *event) {
    return event->phase == 'X' && event->category >= 0 && scanner->tables[CATEGORIES].entries[event->category].kind;
}

static int intern_name(Scanner *scanner, Event *event) {
    if (event->name_id < 0) event->name_id = intern(scanner, NAMES, event->name.start, event->name.size, INT32_MAX);
    return event->name_id >= 0;
}

/* The arguments that this event needs; its phase, category and name (interned for a row) are known. */
static unsigned wanted_fields(const Scanner *scanner, const Event *event) {
    if (event->phase == 'i') return is_memory_event(event) ? MEMORY_FIELDS : 0;
    if (!is_row(scanner, event)) return 0;
    u8 flag = scanner->tables[CATEGORIES].entries[event->category].flag;
    unsigned wanted = flag == ON_DEVICE ? DEVICE_FIELDS : flag == RUNTIME ? RUNTIME_FIELDS : 0;
    return scanner->tables[NAMES].entries[event->name_id].flag == NOT_SHAPED ? wanted : wanted | SHAPE_FIELDS;
}

static Text read_string(Text p, Text end, Span *text, int *escaped) {
    if (*p != '"') return NULL;
    Text quote = find_quote(p + 1, end, escaped);
    text->start = p + 1;
    text->size = quote ? quote - p - 1 : 0;
    return quote ? quote + 1 : NULL;
}

/* A thread or process: a whole number, or a string; the span includes the quotes. */
static Text read_id(Text p, Text end, Span *id) {
    int escaped = 0;
    int64_t number;
    Text start = p;
    p = *p == '"' ? read_string(p, end, id, &escaped) : read_int(p, end, &number, id);
    id->start = start;
    id->size = p ? p - start : 0;
    return p;
}

static Text read_time(const Piece *piece, Text key, Text p, Text end, double *value) {
    int64_t size = piece->time_prefix_size;
    Text quote = key - 1;
    if (size && end - quote > size && !memcmp(quote, piece->time_prefix, (size_t)size))
        return read_decimal(quote + size, end, 1, 1, value);
    return read_decimal(p, end, 0, 0, value);
}

static Text read_category(Scanner *scanner, Text p, Text end, Event *event) {
    Span text;
    int escaped = 0;
    if (!(p = read_string(p, end, &text, &escaped)) || escaped) return NULL;
    event->category = intern(scanner, CATEGORIES, text.start, text.size, MAX_CATEGORIES);
    return p;
}

/* Reads the arguments in place if what they depend on came before them; else `finish_args` does. */
static Text read_event_args(Scanner *scanner, Text p, Text end, Event *event) {
    unsigned needed = PH | NAME | (event->phase == 'X' ? CAT : 0);
    if (*p != '{') return NULL;
    event->args_text.start = p;
    if ((event->seen & needed) == needed) {
        if (is_row(scanner, event) && !intern_name(scanner, event)) return NULL;
        event->wanted = wanted_fields(scanner, event);
        event->args_read = 1;
        p = read_args(p, end, event->wanted, &event->args);
    } else {
        p = skip_value(p, end);
    }
    event->args_text.size = p ? p - event->args_text.start : 0;
    return p;
}

static int finish_args(Scanner *scanner, Event *event) {
    static const u8 EMPTY[] = "{}";
    if (is_row(scanner, event) && !intern_name(scanner, event)) return 0;
    if (event->args_read) return 1;
    if (!event->args_text.size) event->args_text = (Span){EMPTY, 2};
    event->wanted = wanted_fields(scanner, event);
    Text start = event->args_text.start;
    event->args.has = 0;
    return !event->wanted || read_args(start, start + event->args_text.size, event->wanted, &event->args);
}

static int key_bit(Span key) {
    Text k = key.start;
    switch (key.size) {
    case 2: return k[0] == 'p' && k[1] == 'h' ? PH : k[0] == 't' && k[1] == 's' ? TS : 0;
    case 3:
        if (!memcmp(k, "cat", 3)) return CAT;
        if (!memcmp(k, "tid", 3)) return TID;
        if (!memcmp(k, "pid", 3)) return PID;
        return memcmp(k, "dur", 3) ? 0 : DUR;
    case 4: return !memcmp(k, "name", 4) ? NAME : !memcmp(k, "args", 4) ? ARGS : 0;
    default: return 0;
    }
}

static Text read_member(Scanner *scanner, const Piece *piece, Text p, Text end, Span key, Event *event) {
    Span text;
    int bit = key_bit(key), escaped = 0;
    if (event->seen & (unsigned)bit) return NULL;
    event->seen |= (unsigned)bit;
    switch (bit) {
    case PH:
        if (!(p = read_string(p, end, &text, &escaped)) || escaped || text.size != 1) return NULL;
        event->phase = *text.start;
        return p;
    case CAT: return read_category(scanner, p, end, event);
    case NAME: return read_string(p, end, &event->name, &event->name_escaped);
    case TID: return read_id(p, end, &event->tid);
    case PID: return read_id(p, end, &event->pid);
    case TS: return read_time(piece, key.start, p, end, &event->ts);
    case DUR: return read_decimal(p, end, 0, 0, &event->dur);
    case ARGS: return read_event_args(scanner, p, end, event);
    default: return skip_value(p, end);
    }
}

/* Reads the event at `p`, whose opening brace was seen. */
static Text read_event(Scanner *scanner, const Piece *piece, Text p, Text end, Event *event) {
    Span key;
    event->start = p;
    event->seen = event->wanted = 0;
    event->phase = 0;
    event->name_escaped = event->args_read = 0;
    event->category = 0; /* the first category is "" */
    event->name_id = -1;
    event->ts = event->dur = 0;
    event->args_text.size = event->name.size = 0;
    event->pid = event->tid = ZERO_ID;
    p = skip_space(p + 1, end);
    for (;;) {
        if (UNLIKELY(!(p = skip_key(p, end, &key)))) return NULL;
        p = read_member(scanner, piece, p, end, key, event);
        if (UNLIKELY(!p || p >= end)) return NULL;
        if (*p != ',') {
            p = skip_space(p, end);
            if (UNLIKELY(p >= end)) return NULL;
            if (*p == '}') return p + 1;
            if (*p != ',') return NULL;
        }
        p = skip_space(p + 1, end);
    }
}

/* ---- columns ---- */

/* Whole nanoseconds after `base_us`, as `columns.to_ns` computes them. */
static int64_t to_ns(double time_us, int64_t base_us) {
    int64_t whole = (int64_t)time_us;
    whole -= time_us < (double)whole;
    double fraction = ((time_us - (double)whole) * 1000.0 + 0x1p52) - 0x1p52; /* to the nearest, ties to even */
    return (whole - base_us) * 1000 + (int64_t)fraction;
}

/* Ids beyond 31 bits wrap, as in `columns.to_int32`, which treats other negative ids of such a batch differently. */
static int32_t to_int32(Scanner *scanner, int64_t id) {
    if (id < -1) scanner->odd_ids |= 1;
    if (id == (int32_t)id) return (int32_t)id;
    scanner->odd_ids |= 2;
    return (int32_t)(id & INT32_MAX);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static void add_details(Scanner *scanner, Piece *piece, int64_t row, const Args *args) {
    int64_t size = number_of(args, BYTES), external = larger(number_of(args, EXT), number_of(args, OLD_EXT));
    if (size >= 0) {
        piece->size_row[piece->sizes] = (int32_t)row;
        piece->size_bytes[piece->sizes++] = size;
    }
    if (external >= 0) {
        piece->external_row[piece->externals] = (int32_t)row;
        piece->external_id[piece->externals++] = external;
    }
    if (args->has & BIT(BLOCKS) && args->blocks >= 0) {
        piece->block_row[piece->blocks] = (int32_t)row;
        piece->block_per_sm[piece->blocks++] = args->blocks;
    }
    if (args->has & BIT(GRID)) {
        Span parts[] = {text_of(args, GRID), text_of(args, BLOCK), text_of(args, REGISTERS), text_of(args, SHARED)};
        piece->grid_row[piece->grids] = (int32_t)row;
        piece->grid_key[piece->grids++] = intern_parts(scanner, GRIDS, parts, 4);
    }
}

/* Copies text that the caller needs after the buffer has the next block; its position is that of the copy. */
static int keep_text(Scanner *scanner, Text start, int64_t size, int64_t *kept_start, int64_t *kept_size) {
    *kept_start = (int64_t)scanner->texts.used;
    *kept_size = size;
    if (!keep_bytes(&scanner->texts, start, (size_t)size)) scanner->no_memory = 1;
    return !scanner->no_memory;
}

static void add_call(Scanner *scanner, Piece *piece, int64_t row, const Event *event) {
    Span parts[NUM_FIELDS - CALL_FIRST + 1];
    int64_t at = piece->calls++;
    parts[0] = event->name;
    for (int field = CALL_FIRST; field < NUM_FIELDS; field++) parts[field - CALL_FIRST + 1] = text_of(&event->args, field);
    piece->call_row[at] = (int32_t)row;
    int32_t key = piece->call_key[at] = intern_parts(scanner, CALLS, parts, NUM_FIELDS - CALL_FIRST + 1);
    if (key < 0 || scanner->tables[CALLS].entries[key].flag) return;
    int64_t first = piece->firsts++;
    scanner->tables[CALLS].entries[key].flag = 1;
    piece->first_key[first] = key;
    piece->first_name[first] = event->name_id;
    keep_text(scanner, event->args_text.start, event->args_text.size, &piece->first_start[first], &piece->first_size[first]);
}

static void add_shape(Scanner *scanner, Piece *piece, int64_t row, const Args *args) {
    int64_t at = piece->shaped++;
    piece->shaped_row[at] = (int32_t)row;
    Span parts[] = {text_of(args, DIMS), text_of(args, DTYPES), text_of(args, SCALARS)};
    piece->shaped_key[at] = intern_parts(scanner, SHAPES, parts, 3);
    piece->shaped_ext[at] = larger(number_of(args, EXT), number_of(args, OLD_EXT));
}

/* Returns the number of the event's process and thread, which are mostly those of the row before. */
static int32_t thread_of(Scanner *scanner, int on_device, const Event *event) {
    const Table *table = &scanner->tables[THREADS];
    int32_t *last = &scanner->last_thread[on_device];
    if (*last >= 0) {
        const Entry *entry = &table->entries[*last];
        const u8 *text = table->bytes + entry->start;
        if (entry->size == event->pid.size + event->tid.size + 2 && text[event->pid.size] == 0
            && !memcmp(text, event->pid.start, (size_t)event->pid.size)
            && !memcmp(text + event->pid.size + 1, event->tid.start, (size_t)event->tid.size))
            return *last;
    }
    return *last = intern_parts(scanner, THREADS, (Span[]){event->pid, event->tid}, 2);
}

static int add_row(Scanner *scanner, Piece *piece, Event *event) {
    Entry *category = &scanner->tables[CATEGORIES].entries[event->category];
    const Args *args = &event->args;
    double time = event->ts;
    if (!(time < MAX_TIME_US && time > -MAX_TIME_US && event->dur >= 0 && event->dur < MAX_TIME_US)) {
        piece->bad++;
        return 1;
    }
    if (!finish_args(scanner, event)) return 0;
    if (piece->time_offset_us != 0 && time > LONG_TIME_US) time -= piece->time_offset_us;
    if (!piece->has_base) {
        piece->base_us = (int64_t)time - (time < (double)(int64_t)time);
        piece->has_base = 1;
    }
    int64_t row = piece->rows++;
    piece->ts_ns[row] = to_ns(time, piece->base_us);
    piece->dur_ns[row] = to_ns(event->dur, 0);
    piece->kind[row] = category->kind;
    piece->name[row] = event->name_id;
    piece->thread[row] = thread_of(scanner, category->flag == ON_DEVICE, event);
    piece->corr[row] = category->flag == HOST ? -1 : to_int32(scanner, number_of(args, CORR));
    piece->device[row] = -1;
    piece->stream[row] = -1;
    if (category->flag == ON_DEVICE) {
        int32_t device = to_int32(scanner, number_of(args, DEVICE));
        piece->device[row] = (int16_t)(device < -1 ? -1 : device > INT16_MAX ? INT16_MAX : device);
        piece->stream[row] = to_int32(scanner, number_of(args, STREAM));
        add_details(scanner, piece, row, args);
        if (args->has & BIT(CALL_NAME)) add_call(scanner, piece, row, event);
    }
    if (event->wanted & args->has & BIT(DIMS)) add_shape(scanner, piece, row, args);
    return !scanner->no_memory;
}

static int add_memory_point(Scanner *scanner, Piece *piece, Event *event) {
    const int64_t limit = (int64_t)1 << 62;
    if (!finish_args(scanner, event)) return 0;
    const Args *args = &event->args;
    int64_t allocated = number_of(args, ALLOCATED), reserved = number_of(args, RESERVED);
    if (allocated < 0 || allocated >= limit) return 1;
    int on_device = number_of(args, DEVICE_TYPE) != 0;
    int64_t at = piece->points++, device = number_of(args, DEVICE_ID);
    piece->point_us[at] = event->ts;
    piece->point_allocated[at] = allocated;
    piece->point_reserved[at] = on_device && reserved >= 0 && reserved < limit ? reserved : -1;
    piece->point_device[at] = (int16_t)(on_device && device >= 0 && device <= INT16_MAX ? device : -1);
    return 1;
}

/* Returns 0 to refuse: an event that strict and lenient parsers could read differently. */
static int add_event(Scanner *scanner, Piece *piece, Event *event, Text end) {
    switch (event->phase) {
    case 'X':
        if (!(event->seen & TS) || !(event->seen & NAME)) return 0;
        if (event->category >= 0) scanner->tables[CATEGORIES].entries[event->category].seen = scanner->block;
        return is_row(scanner, event) ? add_row(scanner, piece, event) : 1;
    case 'i':
        if (!(event->seen & TS) || !(event->seen & NAME) || event->name_escaped) return 0;
        return is_memory_event(event) ? add_memory_point(scanner, piece, event) : 1;
    case 'M': {
        int64_t at = piece->metas++;
        return keep_text(scanner, event->start, end - event->start, &piece->meta_start[at], &piece->meta_size[at]);
    }
    default: return event->phase && strchr("sftbenCBEIPNOD", event->phase) != NULL;
    }
}

/* ---- layouts of events ----
 *
 * Writers of traces repeat a few layouts: between the values that differ, events have the same bytes. A layout is a path
 * of steps from the comma before an event to its closing brace; a step is the bytes that must follow, and the kind of
 * value after them. It is learned from an event that the functions above accepted; an event that has no layout, or a
 * value that is not plain, is left to them. A layout therefore only says faster what they would say.
 */

enum { MAX_STEPS = 1024, MAX_SIBLINGS = 24, MAX_LESSONS = 4096, MAX_BYTES = 64, READ_AHEAD = 128 };
enum Hole { NOTHING, NUMBER, STRING, VALUE, ID_HOLE, NAME_HOLE, TIME, DURATION, INT, FIELD_HOLE, LATER, END };

typedef struct Step {
    u8 bytes[MAX_BYTES];
    int32_t child, sibling; /* what may follow, and what may be here instead; -1: nothing */
    int32_t category; /* of END */
    unsigned seen; /* of END: PH, CAT, ... */
    u8 size, hole;
    u8 field; /* of INT, FIELD_HOLE and LATER; of ID_HOLE: PID or TID; of END: the phase */
    u8 key; /* of TIME: bytes from the key's first letter to the value */
    u8 opens, closes; /* position after the brace that opens or closes `args`; 0: not in these bytes */
} Step;

static inline int has_bytes(Text p, const Step *step) {
#if defined(__SSE2__)
    for (int i = 0; i < step->size; i += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(p + i)), w = _mm_loadu_si128((const __m128i *)(step->bytes + i));
        unsigned differ = ~(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(v, w)) & 0xFFFF;
        if (differ) return i + __builtin_ctz(differ) >= step->size;
    }
    return 1;
#else
    return !memcmp(p, step->bytes, step->size);
#endif
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* Number of digits at `p`, up to 8. */
static inline int count_digits(uint64_t eight) {
    const uint64_t ones = 0x0101010101010101u;
    uint64_t odd = eight ^ (ones * '0');
    odd = ((odd + ones * 6) | odd) & (ones * 0xF0); /* a carry only reaches bytes after one that is odd */
    return odd ? __builtin_ctzll(odd) >> 3 : 8;
}

/* The value of the first `count` (1 to 8) digits. */
static inline uint64_t value_of_digits(uint64_t eight, int count) {
    eight = (eight << (64 - 8 * count)) & 0x0F0F0F0F0F0F0F0Fu;
    eight = (eight * 2561) >> 8;
    eight = ((eight & 0x00FF00FF00FF00FFu) * 6553601) >> 16;
    return ((eight & 0x0000FFFF0000FFFFu) * 42949672960001u) >> 32;
}
#else
static inline int count_digits(uint64_t eight) {
    u8 bytes[8];
    int count = 0;
    memcpy(bytes, &eight, 8);
    while (count < 8 && is_digit(bytes[count])) count++;
    return count;
}

static inline uint64_t value_of_digits(uint64_t eight, int count) {
    u8 bytes[8];
    uint64_t value = 0;
    memcpy(bytes, &eight, 8);
    for (int i = 0; i < count; i++) value = 10 * value + (uint64_t)(bytes[i] - '0');
    return value;
}
#endif

static const uint64_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

/* Up to 16 digits; returns their number. 24 bytes can be read. */
static inline int read_digits(Text p, uint64_t *value) {
    uint64_t eight = load64(p);
    int count = count_digits(eight), more;
    if (LIKELY(count < 8)) {
        *value = count ? value_of_digits(eight, count) : 0;
        return count;
    }
    *value = value_of_digits(eight, 8);
    eight = load64(p + 8);
    if ((more = count_digits(eight))) *value = *value * TENS[more] + value_of_digits(eight, more);
    return 8 + more;
}

/* The functions below read plain values fast, and leave others to those above. 40 bytes can be read. */

static inline Text pass_number(Text p, Text end) {
    Text start = p;
    int count = count_digits(load64(p));
    if (UNLIKELY(!count || (*p == '0' && count > 1))) return skip_number(start, end);
    p += count;
    if (count == 8) p += count_digits(load64(p));
    if (*p == '.') {
        int places = count_digits(load64(++p));
        if (!places) return NULL;
        p += places;
    }
    return UNLIKELY(is_digit(*p) || (*p | 32) == 'e') ? skip_number(start, end) : p;
}

static inline Text pass_int(Text p, Text end, int64_t *value, Span *raw) {
    uint64_t number;
    int count = read_digits(p, &number);
    if (UNLIKELY(!count || count == 16 || (*p == '0' && count > 1))) return read_int(p, end, value, raw);
    *raw = (Span){p, count};
    *value = (int64_t)number;
    p += count;
    return *p == '.' || (*p | 32) == 'e' ? NULL : p;
}

/* `before`: digits that were read before, `known` of them (0 or 1). */
static inline Text pass_decimal(Text start, Text end, uint64_t before, int known, double *value) {
    static const double POWERS[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8};
    uint64_t digits;
    Text p = start;
    int count = read_digits(p, &digits), places = 0;
    if (UNLIKELY(!count || count == 16 || (*p == '0' && count > 1))) return read_decimal(start, end, before, known, value);
    digits += before * (count > 8 ? TENS[8] * TENS[count - 8] : TENS[count]);
    p += count;
    if (*p == '.') {
        uint64_t eight = load64(++p);
        places = count_digits(eight);
        if (UNLIKELY(!places || places == 8 || digits >= ((uint64_t)1 << 53) / TENS[places]))
            return read_decimal(start, end, before, known, value);
        digits = digits * TENS[places] + value_of_digits(eight, places);
        p += places;
    }
    if (UNLIKELY(digits > (uint64_t)1 << 53 || (*p | 32) == 'e')) return read_decimal(start, end, before, known, value);
    *value = (double)digits / POWERS[places];
    return p;
}

static inline Text pass_time(const Piece *piece, Text key, Text p, Text end, double *value) {
    int64_t size = piece->time_prefix_size;
    Text quote = key - 1;
    if (!size) return pass_decimal(p, end, 0, 0, value);
    if (size > 32 || memcmp(quote, piece->time_prefix, (size_t)size)) return read_time(piece, key, p, end, value);
    return pass_decimal(quote + size, end, 1, 1, value);
}

static inline Text pass_id(Text p, Text end, Span *id) {
    Text start = p;
    uint64_t eight = load64(p);
    int count = count_digits(eight);
    if (UNLIKELY(!count || count == 8 || (*p == '0' && count > 1))) return read_id(p, end, id);
    p += count;
    *id = (Span){start, count};
    return *p == '.' || (*p | 32) == 'e' ? NULL : p;
}

/* Resolves the arguments that the event's name decides about, and adds the event; NULL to leave it to `read_event`. */
static inline int finish_event(Scanner *scanner, Piece *piece, const Step *step, Event *event, unsigned later, Text end) {
    event->phase = step->field;
    event->category = step->category;
    event->seen = step->seen;
    event->name_id = -1;
    event->args_read = 1;
    if (event->phase == 'X') {
        Entry *category = &scanner->tables[CATEGORIES].entries[event->category];
        if (!category->kind) {
            category->seen = scanner->block;
            return 1;
        }
        if (!intern_name(scanner, event)) return 0;
    } else if (event->phase != 'i') {
        return 1;
    }
    event->wanted = wanted_fields(scanner, event);
    for (unsigned left = later & event->wanted; left; left &= left - 1) {
        int field = __builtin_ctz(left);
        Span value = event->args.raw[field];
        if (!read_field(value.start, end, field, &event->args)) return 0;
    }
    return add_event(scanner, piece, event, end);
}

/* Reads the event after the comma at `p` by its layout; NULL if it has none or is not plain. */
static Text read_by_layout(Scanner *scanner, Piece *piece, Text p, Text end, Event *event) {
    Step *steps = scanner->steps;
    int32_t *link = &steps[0].child;
    unsigned later = 0;
    event->args.has = 0;
    event->name_escaped = 0;
    event->ts = event->dur = 0;
    event->args_text.size = event->name.size = 0;
    event->pid = event->tid = ZERO_ID;
    for (;;) {
        Step *step;
        int32_t at = *link;
        if (UNLIKELY(end - p < READ_AHEAD || at < 0)) return NULL;
        step = &steps[at];
        if (UNLIKELY(!has_bytes(p, step))) {
            do { /* the one that fits becomes the first */
                int32_t *from = &step->sibling;
                if ((at = *from) < 0) return NULL;
                step = &steps[at];
                if (!has_bytes(p, step)) continue;
                *from = step->sibling;
                step->sibling = *link;
                *link = at;
                break;
            } while (1);
        }
        if (step->opens) event->args_text.start = p + step->opens - 1;
        if (step->closes) event->args_text.size = p + step->closes - event->args_text.start;
        p += step->size;
        link = &step->child;
        switch (step->hole) {
        case NOTHING: break;
        case NUMBER: p = pass_number(p, end); break;
        case STRING: {
            int escaped;
            p = find_quote(p, end, &escaped);
            break;
        }
        case VALUE: p = skip_value(p, end); break;
        case ID_HOLE: p = pass_id(p, end, step->field == PID ? &event->pid : &event->tid); break;
        case NAME_HOLE:
            event->name.start = p;
            p = find_quote(p, end, &event->name_escaped);
            event->name.size = p ? p - event->name.start : 0;
            break;
        case TIME: p = pass_time(piece, p - step->key, p, end, &event->ts); break;
        case DURATION: p = pass_decimal(p, end, 0, 0, &event->dur); break;
        case INT:
            p = pass_int(p, end, &event->args.number[step->field], &event->args.raw[step->field]);
            event->args.has |= BIT(step->field);
            break;
        case FIELD_HOLE: p = read_field(p, end, step->field, &event->args); break;
        case LATER:
            event->args.raw[step->field].start = p;
            later |= BIT(step->field);
            p = is_digit(*p) ? pass_number(p, end) : skip_value(p, end);
            break;
        default:
            return finish_event(scanner, piece, step, event, later, p) ? p : NULL;
        }
        if (UNLIKELY(!p)) return NULL;
    }
}

typedef struct {
    Scanner *scanner;
    int32_t parent;
    Text start; /* of the bytes that belong to no step yet */
    Text opens, closes;
} Lesson;

/* Adds the step whose bytes end at `p`, or finds it; returns NULL without room. */
static Step *add_step(Lesson *lesson, Text p, int hole, int field, int key) {
    Step *steps = lesson->scanner->steps;
    while (p - lesson->start > MAX_BYTES)
        if (!add_step(lesson, lesson->start + MAX_BYTES, NOTHING, 0, 0)) return NULL;
    Step new = {.child = -1, .sibling = -1, .size = (u8)(p - lesson->start), .hole = (u8)hole, .field = (u8)field, .key = (u8)key};
    memcpy(new.bytes, lesson->start, new.size);
    if (lesson->opens >= lesson->start && lesson->opens < p) new.opens = (u8)(lesson->opens - lesson->start + 1);
    if (lesson->closes > lesson->start && lesson->closes <= p) new.closes = (u8)(lesson->closes - lesson->start);
    int32_t *link = &steps[lesson->parent].child;
    int siblings = 0;
    for (; *link >= 0; link = &steps[*link].sibling, siblings++) {
        Step *step = &steps[*link];
        if (step->size == new.size && step->hole == hole && step->field == field && step->key == key && !memcmp(step->bytes, new.bytes, new.size)) break;
    }
    if (*link < 0) {
        if (siblings >= MAX_SIBLINGS || lesson->scanner->num_steps >= MAX_STEPS) return NULL;
        *link = lesson->scanner->num_steps++;
        steps[*link] = new;
    }
    lesson->parent = *link;
    lesson->start = p;
    return &steps[*link];
}

/* Adds the step before the value between `p` and `next`. */
static int add_value(Lesson *lesson, Text p, Text next, int hole, int field, int key) {
    int in_quotes = hole == STRING || hole == NAME_HOLE;
    if (!add_step(lesson, p + in_quotes, hole, field, key)) return 0;
    lesson->start = next - in_quotes;
    return 1;
}

/* Whether the value is a word, missing or broken. */
static int is_word(Text p) { return *p != '"' && *p != '{' && *p != '[' && !is_digit(*p) && !(*p == '-' && is_digit(p[1])); }

/* Adds the step before a value that no rule reads; a word becomes bytes of the next step. */
static int add_unread(Lesson *lesson, Text p, Text next) {
    return is_word(p) || add_value(lesson, p, next, *p == '"' ? STRING : *p == '{' || *p == '[' ? VALUE : NUMBER, 0, 0);
}

/* Adds the steps of `args`, whose brace is at `p`. */
static int learn_args(Lesson *lesson, Text p, Text end, unsigned needed, unsigned later) {
    unsigned found = 0;
    Span key;
    lesson->opens = p;
    p = skip_space(p + 1, end);
    while (*p != '}') {
        if (!(p = skip_key(p, end, &key))) return 0;
        int field = field_of(key, needed | later), done;
        Text next = skip_value(p, end);
        if (!next) return 0;
        if (field < 0) {
            done = add_unread(lesson, p, next);
        } else if (found & BIT(field)) {
            return 0;
        } else if (is_word(p)) {
            done = *p == 'n' && p[1] == 'u' && (field == REGISTERS || field == SHARED || field == CALL_NAME); /* as if absent */
        } else {
            int hole = !(needed & BIT(field)) ? LATER : field < NUM_INTS ? INT : FIELD_HOLE;
            done = add_value(lesson, p, next, hole, field, 0);
        }
        if (!done) return 0;
        if (field >= 0) found |= BIT(field);
        p = skip_space(next, end);
        if (*p == ',') p = skip_space(p + 1, end);
    }
    lesson->closes = p + 1;
    return 1;
}

/* Learns the layout of an accepted event: `p` is at the comma before it, `end` after its closing brace. */
static void learn(Scanner *scanner, Text p, Text end, const Event *event) {
    Lesson lesson = {scanner, 0, p, NULL, NULL};
    Span key;
    if (event->phase == 'M' || event->category < 0 || scanner->lessons >= MAX_LESSONS) return;
    scanner->lessons++;
    int is_kept = is_row(scanner, event);
    u8 flag = scanner->tables[CATEGORIES].entries[event->category].flag;
    unsigned needed = !is_kept ? 0 : flag == ON_DEVICE ? DEVICE_FIELDS : flag == RUNTIME ? RUNTIME_FIELDS : 0;
    unsigned later = is_kept ? SHAPE_FIELDS & ~needed : event->phase == 'i' ? MEMORY_FIELDS : 0;
    p = skip_space(p + 1, end);
    do {
        p = skip_key(skip_space(p + 1, end), end, &key);
        Text next = p ? skip_value(p, end) : NULL;
        if (!next) return;
        int bit = key_bit(key), done = 1;
        if (bit == NAME) done = add_value(&lesson, p, next, NAME_HOLE, 0, 0);
        else if (bit == TS) done = p - key.start < 40 && add_value(&lesson, p, next, TIME, 0, (int)(p - key.start));
        else if (bit == DUR) done = add_value(&lesson, p, next, DURATION, 0, 0);
        else if (bit == PID || bit == TID) done = add_value(&lesson, p, next, ID_HOLE, bit, 0);
        else if (bit == ARGS) done = learn_args(&lesson, p, end, needed, later);
        else if (bit != PH && bit != CAT) done = add_unread(&lesson, p, next);
        if (!done) return;
        p = skip_space(next, end);
    } while (*p == ',');
    Step *step = add_step(&lesson, end, END, event->phase, 0);
    if (!step) return;
    step->category = event->category;
    step->seen = event->seen;
}

/* ---- interface ---- */

EXPORT int ccl_version(void) { return VERSION; }

EXPORT void ccl_free(Scanner *scanner) {
    if (!scanner) return;
    for (int which = 0; which < NUM_TABLES; which++) {
        free(scanner->tables[which].entries);
        free(scanner->tables[which].slots);
        free(scanner->tables[which].bytes);
    }
    free(scanner->texts.bytes);
    free(scanner->steps);
    free(scanner->key);
    free(scanner);
}

/* Returns NULL without memory. `seed` makes collisions of the hash unpredictable. */
EXPORT Scanner *ccl_new(uint64_t seed) {
    Scanner *scanner = calloc(1, sizeof *scanner);
    if (!scanner) return NULL;
    scanner->seed = seed;
    scanner->last_thread[0] = scanner->last_thread[1] = -1;
    scanner->steps = calloc(MAX_STEPS, sizeof *scanner->steps);
    if (scanner->steps && intern(scanner, CATEGORIES, (Text) "", 0, MAX_CATEGORIES) == 0) {
        scanner->num_steps = 1; /* the first only has children: what an event may begin with */
        scanner->steps[0].child = scanner->steps[0].sibling = -1;
        return scanner;
    }
    ccl_free(scanner);
    return NULL;
}

/* Events of this category become rows of this kind (not 0); `flag`: HOST, RUNTIME or ON_DEVICE. */
EXPORT int ccl_add_category(Scanner *scanner, const char *name, int64_t size, int kind, int flag) {
    int32_t id = intern(scanner, CATEGORIES, (Text)name, size, MAX_CATEGORIES);
    if (id < 0) return NO_MEMORY;
    scanner->tables[CATEGORIES].entries[id].kind = (u8)kind;
    scanner->tables[CATEGORIES].entries[id].flag = (u8)flag;
    if (flag == ON_DEVICE) scanner->on_device[(u8)kind] = 1;
    return ACCEPTED;
}

EXPORT int64_t ccl_count(const Scanner *scanner, int which) { return scanner->tables[which].count; }

/* Returns the text of that number, and its size. The address is valid until the next call of `ccl_scan`. */
EXPORT const char *ccl_text(const Scanner *scanner, int which, int64_t id, int64_t *size) {
    const Entry *entry = &scanner->tables[which].entries[id];
    *size = entry->size;
    return (const char *)scanner->tables[which].bytes + entry->start;
}

/* Says whether the shapes of the operator of that name are kept. */
EXPORT void ccl_set_shaped(Scanner *scanner, int64_t name, int shaped) {
    scanner->tables[NAMES].entries[name].flag = shaped ? SHAPED : NOT_SHAPED;
}

/* Returns whether an event of an accepted block had this category. */
EXPORT int ccl_was_seen(const Scanner *scanner, int64_t category) {
    return scanner->tables[CATEGORIES].entries[category].accepted != 0;
}

/* Writes the entry of `map` for each of the numbers, which are within it. */
EXPORT void ccl_translate(const int32_t *map, const int32_t *numbers, int64_t count, int32_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = map[numbers[i]];
}

/* Writes for each time the value whose number is that of the edges (sorted) up to it; neighbors mostly have the same. */
EXPORT void ccl_look_up(const int64_t *edges, int64_t num_edges, const int32_t *values, const int64_t *times, int64_t count,
    int32_t *to) {
    int64_t low = INT64_MIN, high = num_edges ? edges[0] : INT64_MAX;
    int32_t value = values[0];
    for (int64_t i = 0; i < count; i++) {
        int64_t time = times[i];
        if (UNLIKELY(time < low || time >= high)) {
            int64_t first = 0, last = num_edges; /* the number of edges up to the time is between these */
            while (first < last) {
                int64_t middle = (first + last) / 2;
                if (edges[middle] <= time) first = middle + 1;
                else last = middle;
            }
            low = first ? edges[first - 1] : INT64_MIN;
            high = first < num_edges ? edges[first] : INT64_MAX;
            value = values[first];
        }
        to[i] = value;
    }
}

/* Finds the numbers whose entry of `map` is -1, in the order of first use; sets their entries to 0. Returns how many. */
EXPORT int64_t ccl_find_new(int32_t *map, const int32_t *numbers, int64_t count, int32_t *found) {
    int64_t num_found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (LIKELY(map[numbers[i]] != -1)) continue;
        map[numbers[i]] = 0;
        found[num_found++] = numbers[i];
    }
    return num_found;
}

enum { HOST_KINDS = 3 };

/* Copies the rows of a piece into columns of a table. The maps give the table's numbers of names and threads, and the
 * process of each of the piece's threads; a row on a device has its stream in place of a thread. `hosts` counts the rows of
 * each process by the kinds that `host_kinds` numbers. */
EXPORT void ccl_copy_rows(const Scanner *scanner, const Piece *piece, const u8 *host_kinds, const int32_t *name_map, const int32_t *thread_map,
    const int32_t *process_map, int64_t *hosts, int64_t *ts_ns, int64_t *dur_ns, u8 *kind, int32_t *name, int16_t *device, int32_t *stream,
    int32_t *corr, int16_t *process) {
    size_t count = (size_t)piece->rows;
    memcpy(ts_ns, piece->ts_ns, count * sizeof *ts_ns);
    memcpy(dur_ns, piece->dur_ns, count * sizeof *dur_ns);
    memcpy(kind, piece->kind, count * sizeof *kind);
    memcpy(device, piece->device, count * sizeof *device);
    memcpy(corr, piece->corr, count * sizeof *corr);
    for (size_t row = 0; row < count; row++) name[row] = name_map[piece->name[row]];
    for (size_t row = 0; row < count; row++) {
        int32_t thread = piece->thread[row];
        int32_t from = process_map[thread];
        process[row] = (int16_t)from;
        hosts[HOST_KINDS * from + host_kinds[piece->kind[row]]]++;
        stream[row] = scanner->on_device[piece->kind[row]] ? piece->stream[row] : thread_map[thread];
    }
}

static int scan(Scanner *scanner, Piece *piece, Text p, Text end) {
    Event event;
    if (p >= end || (*p != '[' && *p != ',')) return REFUSED;
    for (int is_first = 1; p < end; is_first = 0) {
        if ((*p != ',' && !is_first) || piece->events >= piece->capacity) return REFUSED;
        Text comma = p;
        if (*p != ',' || !(p = read_by_layout(scanner, piece, comma, end, &event))) {
            p = skip_space(comma + 1, end);
            if (p >= end || *p != '{') return REFUSED;
            p = read_event(scanner, piece, p, end, &event);
            if (!p || !add_event(scanner, piece, &event, p)) return REFUSED;
            if (*comma == ',') learn(scanner, comma, p, &event);
        }
        piece->events++;
        p = skip_space(p, end);
    }
    return scanner->odd_ids == 3 ? REFUSED : ACCEPTED;
}

static void undo(Scanner *scanner, Piece *piece, const Piece *before) {
    for (int64_t first = before->firsts; first < piece->firsts; first++)
        scanner->tables[CALLS].entries[piece->first_key[first]].flag = 0;
    *piece = *before;
}

static void begin(Scanner *scanner, const Piece *piece) {
    scanner->no_memory = 0;
    scanner->first_block = scanner->block + 1;
    if (!piece->firsts && !piece->metas) scanner->texts.used = 0;
}

/* Scans a block of pieces, which end at `stops`, and appends their events to the columns if it accepts all. */
static int scan_block(Scanner *scanner, Piece *piece, const int64_t *stops, int64_t count) {
    Piece before = *piece;
    Text p = piece->text;
    int answer = ACCEPTED;
    scanner->block++;
    for (int64_t i = 0; i < count && answer == ACCEPTED; i++) {
        Text end = piece->text + stops[i];
        scanner->odd_ids = 0;
        answer = scan(scanner, piece, skip_space(p, end), end);
        p = end;
    }
    if (scanner->no_memory) answer = NO_MEMORY;
    if (answer != ACCEPTED) {
        undo(scanner, piece, &before);
    } else {
        Table *categories = &scanner->tables[CATEGORIES];
        for (int32_t id = 0; id < categories->count; id++)
            if (categories->entries[id].seen == scanner->block) categories->entries[id].accepted = scanner->block;
    }
    piece->kept = scanner->texts.bytes;
    return answer;
}

/* Scans consecutive pieces of the text, which end at `stops`: each is space, a bracket or comma, then events with commas
 * between them. */
EXPORT int ccl_scan(Scanner *scanner, Piece *piece, const int64_t *stops, int64_t count) {
    begin(scanner, piece);
    return scan_block(scanner, piece, stops, count);
}

/* Forgets what the last call of `ccl_scan` or `ccl_scan_file` accepted; `before`: the piece before it. */
EXPORT void ccl_undo(Scanner *scanner, Piece *piece, const Piece *before) {
    Table *categories = &scanner->tables[CATEGORIES];
    for (int32_t id = 0; id < categories->count; id++)
        if (categories->entries[id].accepted >= scanner->first_block) categories->entries[id].accepted = 0;
    undo(scanner, piece, before);
}

/* Fills the text from that position of the file; returns whether all could be read. */
static int read_at(int file, u8 *text, int64_t size, int64_t position) {
    while (size) {
        ssize_t count = pread(file, text, (size_t)size, (off_t)position);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        text += count;
        size -= count;
        position += count;
    }
    return 1;
}

/* Returns the position of the last separator after the first byte; 0 without one. */
static int64_t find_last(Text text, int64_t size, Text separator, int64_t separator_size) {
    for (int64_t at = size - separator_size; at > 0; at--)
        if (text[at] == *separator && !memcmp(text + at, separator, (size_t)separator_size)) return at;
    return 0;
}

/* Scans the file from `*position` to `stop`, which follows an event, as one piece after another of up to `room` bytes:
 * all end `after` bytes into a separator of two events, up to which the text is read again into `text`. Sets `*position`
 * to the end of the pieces that were accepted; the first one that is refused ends the call, and so does `*cancel`. */
EXPORT int ccl_scan_file(Scanner *scanner, Piece *piece, int file, int64_t *position, int64_t stop, u8 *text, int64_t room,
    Text separator, int64_t separator_size, int64_t after, const volatile int *cancel) {
    int64_t left = 0; /* bytes that were read after `*position` */
    begin(scanner, piece);
    piece->text = text;
    while (*position < stop && !*cancel) {
        int64_t wanted = stop - *position - left;
        if (wanted > room / 2) wanted = room / 2;
        if (left + wanted > room || !read_at(file, text + left, wanted, *position + left)) return REFUSED;
        left += wanted;
        int64_t end = *position + left == stop ? left : find_last(text, left, separator, separator_size);
        if (!end) continue;
        if (end < left) end += after;
        int answer = scan_block(scanner, piece, &end, 1);
        if (answer != ACCEPTED) return answer;
        *position += end;
        left -= end;
        memmove(text, text + end, (size_t)left);
    }
    return ACCEPTED;
}
