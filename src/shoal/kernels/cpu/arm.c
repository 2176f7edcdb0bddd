/* The inner loop of a tile of 4 rows by 6 columns on 64-bit Arm: 24 sums, which take 24 of the 32 registers. Part of
 * native.c.
 *
 * The same products and sums as the loops in C, with loads scheduled as compilers do not: each operand is loaded some
 * products before its use. On a Neoverse-N1 a step takes 12.2 cycles instead of 16.6; 24 products take at least 12. */

#if defined(__ARM_NEON) && defined(__aarch64__) && defined(__GNUC__)
#define HAS_ARM_TILES 1

/* the arguments of the loop; their order is fixed */
typedef struct {
  const void *x[4], *w[6];
  long steps;       /* of 16 bytes, at least one */
  const char *soon; /* prefetched at every step, then advanced by `jump` bytes */
  long jump;
} ArmTile;

/* soon: prefetched while the tile is computed, `pace` lines for every four steps; or NULL */
INLINE ArmTile arm_tile(const void *const *x, const void *const *w, long steps, const char *soon, int pace) {
  ArmTile t = {.steps = steps, .soon = pace ? soon : (const char *)w[0], .jump = pace * 16};
  memcpy(t.x, x, sizeof t.x);
  memcpy(t.w, w, sizeof t.w);
  return t;
}

/* clang-format off */
#define ARM_LOAD(to, from) "ldr " to ", [" from "], #16\n "
#define ARM_ONE(op, type, sum, x, w) op " %[" #sum "].4s, " x "." type ", " w "." type "\n "
#define ARM_FOUR(op, type, a, b, c, d, w) \
  ARM_ONE(op, type, a, "v0", w) ARM_ONE(op, type, b, "v1", w) \
  ARM_ONE(op, type, c, "v2", w) ARM_ONE(op, type, d, "v3", w)
#define ARM_ZERO(a, b, c, d) \
  "movi %[" #a "].4s, #0\n movi %[" #b "].4s, #0\n movi %[" #c "].4s, #0\n movi %[" #d "].4s, #0\n "
#define ARM_SUM(i, j) [s##i##j] "=&w"(sums[i][j])
#define ARM_SUMS(i) ARM_SUM(i, 0), ARM_SUM(i, 1), ARM_SUM(i, 2), ARM_SUM(i, 3), ARM_SUM(i, 4), ARM_SUM(i, 5)

/* sums[i][j] = x[i] w[j]. x18 is not ours on every system. */
#define ARM_TILE(name, op, type, vector)                                                                     \
  INLINE void name(vector sums[][DOT_COLUMNS], const ArmTile *t) {                                           \
    __asm__ volatile(                                                                                        \
        "ldp x9, x10, [%[t]]\n ldp x11, x12, [%[t], #16]\n ldp x13, x14, [%[t], #32]\n "                     \
        "ldp x15, x16, [%[t], #48]\n ldp x17, x8, [%[t], #64]\n ldp x7, x6, [%[t], #80]\n ldr x5, [%[t], #96]\n " \
        ARM_LOAD("q0", "x9") ARM_LOAD("q1", "x10") ARM_LOAD("q2", "x11") ARM_LOAD("q3", "x12")               \
        ARM_LOAD("q4", "x13") ARM_LOAD("q5", "x14")                                                          \
        ARM_ZERO(s00, s10, s20, s30) ARM_ZERO(s01, s11, s21, s31) ARM_ZERO(s02, s12, s22, s32)               \
        ARM_ZERO(s03, s13, s23, s33) ARM_ZERO(s04, s14, s24, s34) ARM_ZERO(s05, s15, s25, s35)               \
        "subs x7, x7, #1\n b.eq 2f\n 1:\n "                                                                  \
        ARM_LOAD("q6", "x15") ARM_FOUR(op, type, s00, s10, s20, s30, "v4")                                   \
        ARM_LOAD("q7", "x16") ARM_FOUR(op, type, s01, s11, s21, s31, "v5")                                   \
        ARM_LOAD("q4", "x17") ARM_FOUR(op, type, s02, s12, s22, s32, "v6")                                   \
        ARM_LOAD("q5", "x8") ARM_FOUR(op, type, s03, s13, s23, s33, "v7")                                    \
        "prfm pldl1keep, [x6]\n add x6, x6, x5\n "                                                           \
        ARM_FOUR(op, type, s04, s14, s24, s34, "v4")                                                         \
        "subs x7, x7, #1\n " ARM_LOAD("q4", "x13")                                                           \
        ARM_ONE(op, type, s05, "v0", "v5") ARM_LOAD("q0", "x9")                                              \
        ARM_ONE(op, type, s15, "v1", "v5") ARM_LOAD("q1", "x10")                                             \
        ARM_ONE(op, type, s25, "v2", "v5") ARM_LOAD("q2", "x11")                                             \
        ARM_ONE(op, type, s35, "v3", "v5") ARM_LOAD("q3", "x12")                                             \
        ARM_LOAD("q5", "x14") "b.ne 1b\n 2:\n " /* the last step: nothing is loaded beyond the end */      \
        ARM_LOAD("q6", "x15") ARM_FOUR(op, type, s00, s10, s20, s30, "v4")                                   \
        ARM_LOAD("q7", "x16") ARM_FOUR(op, type, s01, s11, s21, s31, "v5")                                   \
        ARM_LOAD("q4", "x17") ARM_FOUR(op, type, s02, s12, s22, s32, "v6")                                   \
        ARM_LOAD("q5", "x8") ARM_FOUR(op, type, s03, s13, s23, s33, "v7")                                    \
        ARM_FOUR(op, type, s04, s14, s24, s34, "v4") ARM_FOUR(op, type, s05, s15, s25, s35, "v5")            \
        : ARM_SUMS(0), ARM_SUMS(1), ARM_SUMS(2), ARM_SUMS(3)                                                 \
        : [t] "r"(t)                                                                                         \
        : "memory", "cc", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",      \
          "x17", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7");                                            \
  }
/* clang-format on */

ARM_TILE(arm_dots, "fmla", "4s", floats)
#ifdef __ARM_FEATURE_DOTPROD
ARM_TILE(arm_dots8, "sdot", "16b", int32x4_t)
#endif

#else
#define HAS_ARM_TILES 0
#endif
