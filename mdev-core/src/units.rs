//! Sizes in bytes.

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;
/// Page size of guests, hosts and small GPU pages.
pub const PAGE_SIZE: u64 = 4 * KIB;

/// Returns true if `value` is a multiple of `align`, a power of two.
pub const fn is_aligned(value: u64, align: u64) -> bool {
    value & (align - 1) == 0
}
