//! Reductions: atomic operations of semaphores on memory.

use serde::{Deserialize, Serialize};

/// Operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// The smaller value.
    Min,
    /// The larger value.
    Max,
    /// Exclusive or.
    Xor,
    /// And.
    And,
    /// Or.
    Or,
    /// Wrapping sum.
    Add,
    /// One more, or zero from the operand on.
    Inc,
    /// One less, or the operand after zero and above it.
    Dec,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    operation: Operation,
    /// Whether `Min` and `Max` compare signed values.
    signed: bool,
}

impl Reduction {
    /// Returns the reduction with this number in the host class and the copy class.
    pub const fn of_host(number: u32, signed: bool) -> Option<Self> {
        use Operation as O;
        let operation = match number {
            0 => O::Min,
            1 => O::Max,
            2 => O::Xor,
            3 => O::And,
            4 => O::Or,
            5 => O::Add,
            6 => O::Inc,
            7 => O::Dec,
            _ => return None,
        };
        Some(Self { operation, signed })
    }

    /// Returns the reduction with this number, 0 to 7, in the compute class.
    pub const fn of_compute(number: u32, signed: bool) -> Self {
        use Operation as O;
        let operation = match number & 7 {
            0 => O::Add,
            1 => O::Min,
            2 => O::Max,
            3 => O::Inc,
            4 => O::Dec,
            5 => O::And,
            6 => O::Or,
            _ => O::Xor,
        };
        Self { operation, signed }
    }

    /// Returns the new value of a 32-bit word.
    pub fn apply_u32(self, old: u32, operand: u32) -> u32 {
        let extend = |word: u32| {
            if self.signed {
                i64::from(word.cast_signed()).cast_unsigned()
            } else {
                u64::from(word)
            }
        };
        self.apply_u64(extend(old), extend(operand)) as u32
    }

    /// Returns the new value of a 64-bit word.
    pub fn apply_u64(self, old: u64, operand: u64) -> u64 {
        // In this order unsigned values compare as signed ones do.
        let key = |value: u64| if self.signed { value ^ 1 << 63 } else { value };
        match self.operation {
            Operation::Min => {
                if key(old) <= key(operand) {
                    old
                } else {
                    operand
                }
            }
            Operation::Max => {
                if key(old) >= key(operand) {
                    old
                } else {
                    operand
                }
            }
            Operation::Xor => old ^ operand,
            Operation::And => old & operand,
            Operation::Or => old | operand,
            Operation::Add => old.wrapping_add(operand),
            Operation::Inc => {
                if old >= operand {
                    0
                } else {
                    old + 1
                }
            }
            Operation::Dec => {
                if old == 0 || old > operand {
                    operand
                } else {
                    old - 1
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_operations_of_both_classes() {
        let apply = |numbers: (u32, u32), signed, old, operand| {
            let host = Reduction::of_host(numbers.0, signed).unwrap();
            let compute = Reduction::of_compute(numbers.1, signed);
            assert_eq!(host, compute);
            host.apply_u32(old, operand)
        };
        let minus = u32::MAX;
        assert_eq!([apply((0, 1), true, minus, 1), apply((0, 1), false, minus, 1)], [minus, 1]);
        assert_eq!([apply((1, 2), true, minus, 1), apply((1, 2), false, minus, 1)], [1, minus]);
        assert_eq!(apply((2, 7), false, 6, 3), 5);
        assert_eq!(apply((3, 5), false, 6, 3), 2);
        assert_eq!(apply((4, 6), false, 6, 3), 7);
        assert_eq!([apply((5, 0), true, minus, 3), apply((5, 0), false, minus, 3)], [2, 2]);
        assert_eq!([2, 3, 4].map(|old| apply((6, 3), false, old, 3)), [3, 0, 0]);
        assert_eq!([0, 3, 4].map(|old| apply((7, 4), false, old, 3)), [3, 2, 3]);
        assert_eq!(Reduction::of_host(8, false), None);
    }

    #[test]
    fn wide_values_keep_their_upper_half() {
        let add = Reduction::of_host(5, false).unwrap();
        assert_eq!(add.apply_u64(u64::from(u32::MAX), 1), 1 << 32);
        assert_eq!(add.apply_u32(u32::MAX, 1), 0);
    }
}
