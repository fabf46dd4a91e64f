/* check.h - the whole test harness: a failed CHECK prints file, line and values, is counted, and the test goes on.
 *
 * Going on matters where ranks are threads: a rank that left early would leave its peers waiting in a collective. REQUIRE
 * is for what the rest cannot live without; it ends the program. May be used from any thread. Exit codes: 0 passed,
 * 1 failed, 77 skipped.
 *
 *     static void test_sum(void) { CHECK_EQ(1 + 1, 2); }
 *     int main(void) { CHECK_RUN(test_sum); return check_result(); } */
#ifndef SMPI_TESTS_CHECK_H
#define SMPI_TESTS_CHECK_H

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK_SKIPPED 77

static _Atomic int check_count, check_failures;

/* Counts one check; on failure prints where and why. Returns ok. */
__attribute__((format(printf, 4, 5))) static inline int check_note(int ok, const char *file, int line,
                                                                   const char *format, ...)
{
    atomic_fetch_add(&check_count, 1);
    if (ok) {
        return 1;
    }
    char text[1024];
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    __builtin_va_end(arguments);
    if (atomic_fetch_add(&check_failures, 1) < 50) { /* a broken loop must not print a million lines */
        fprintf(stderr, "%s:%d: %s\n", file, line, text);
    }
    return 0;
}

#define CHECK(condition) check_note((condition) != 0, __FILE__, __LINE__, "CHECK(%s) failed", #condition)

/* Integers of any type. */
#define CHECK_EQ(got, wanted)                                                                                          \
    do {                                                                                                               \
        long long got_ = (long long)(got), wanted_ = (long long)(wanted);                                              \
        check_note(got_ == wanted_, __FILE__, __LINE__, "%s is %lld, wanted %s = %lld", #got, got_, #wanted, wanted_); \
    } while (0)

#define CHECK_STR(got, wanted)                                                                                  \
    do {                                                                                                        \
        const char *got_ = (got), *wanted_ = (wanted);                                                          \
        check_note(got_ && strcmp(got_, wanted_) == 0, __FILE__, __LINE__, "%s is \"%s\", wanted \"%s\"", #got, \
                   got_ ? got_ : "(null)", wanted_);                                                            \
    } while (0)

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!check_note((condition) != 0, __FILE__, __LINE__, "REQUIRE(%s) failed", #condition)) { \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_RUN(test)                                                                      \
    do {                                                                                     \
        int before_ = atomic_load(&check_failures);                                          \
        test();                                                                              \
        printf("%s %s\n", atomic_load(&check_failures) == before_ ? "ok  " : "FAIL", #test); \
        fflush(stdout);                                                                      \
    } while (0)

/* Ends the program as skipped. */
__attribute__((noreturn)) static inline void check_skip(const char *reason)
{
    printf("skipped: %s\n", reason);
    exit(CHECK_SKIPPED);
}

/* What main returns. A program that checked nothing has failed. */
static inline int check_result(void)
{
    int count = atomic_load(&check_count), failures = atomic_load(&check_failures);
    printf("%d checks, %d failed\n", count, failures);
    return count > 0 && failures == 0 ? 0 : 1;
}

#endif
