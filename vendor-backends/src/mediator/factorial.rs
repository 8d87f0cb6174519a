//! Factorials modulo 2^32: the fixed function of QEMU's `edu` device. The software GPU computes the
//! same function.

use mdev_core::abi::program::FunctionId;

/// Id of the function.
pub const FUNCTION: FunctionId = FunctionId(6);

/// Smallest number with a factorial that is a multiple of 2^32.
pub const FIRST_ZERO: u32 = 34;

/// Returns `n!` modulo 2^32.
pub fn factorial(n: u32) -> u32 {
    if n < FIRST_ZERO { (1..=n).fold(1, u32::wrapping_mul) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factorials_match_the_definition() {
        assert_eq!([0, 1, 5, 12].map(factorial), [1, 1, 120, 479_001_600]);
        let mut product = 1u32;
        for n in 1..200 {
            product = product.wrapping_mul(n);
            assert_eq!(factorial(n), product, "{n}");
        }
    }
}
