//! Builder for methods, the words of a pushbuffer.

use mdev_core::abi::host::{
    self, FIRST_CLASS_METHOD, MethodHeader, NON_STALL_INTERRUPT, SEM_ADDR_LO, SUBCHANNEL_COPY,
    SecOp, sem,
};

/// Methods of one submission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Methods {
    words: Vec<u32>,
    copies: bool,
}

impl Methods {
    /// Creates an empty builder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the words.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Removes all methods and keeps the allocation.
    pub fn clear(&mut self) {
        *self = Self { words: std::mem::take(&mut self.words), copies: false };
        self.words.clear();
    }

    /// Returns whether the last engine with work is the copy engine.
    pub fn end_with_copies(&self) -> bool {
        self.copies
    }

    /// Adds consecutive methods, starting at `method`, with one word each.
    pub fn push(&mut self, subchannel: u8, method: u32, words: &[u32]) -> &mut Self {
        let count = words.len() as u32;
        if method >= FIRST_CLASS_METHOD {
            self.copies = subchannel == SUBCHANNEL_COPY;
        }
        self.words.push(MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode());
        self.words.extend_from_slice(words);
        self
    }

    /// Adds two consecutive methods that take an address, upper half first.
    pub fn push_address(&mut self, subchannel: u8, method: u32, address: u64) -> &mut Self {
        self.push(subchannel, method, &[(address >> 32) as u32, address as u32])
    }

    /// Binds a class to a subchannel.
    pub fn set_object(&mut self, subchannel: u8, class: u32) -> &mut Self {
        self.push(subchannel, host::SET_OBJECT, &[class])
    }

    /// Adds a release: the host engine waits for all earlier work, then writes `payload` to `va`.
    pub fn release(&mut self, va: u64, payload: u32) -> &mut Self {
        self.semaphore(va, payload, sem::RELEASE | sem::RELEASE_WFI)
    }

    /// Adds a release with the time in nanoseconds at `va + 8`; `va` must be 16-byte aligned.
    pub fn release_timestamp(&mut self, va: u64, payload: u32) -> &mut Self {
        self.semaphore(va, payload, sem::RELEASE | sem::RELEASE_WFI | sem::RELEASE_TIMESTAMP)
    }

    /// Adds an acquire: the channel waits until the word at `va` has reached `payload`. Other
    /// channels run meanwhile.
    pub fn acquire(&mut self, va: u64, payload: u32) -> &mut Self {
        self.semaphore(va, payload, sem::ACQ_CIRC_GEQ | sem::ACQUIRE_SWITCH_TSG)
    }

    fn semaphore(&mut self, va: u64, payload: u32, execute: u32) -> &mut Self {
        self.push(0, SEM_ADDR_LO, &[va as u32, (va >> 32) as u32, payload, 0, execute])
    }

    /// Adds a yield to the other channels of the group. Without yields, a ring that never runs
    /// empty blocks them.
    pub fn give_way(&mut self) -> &mut Self {
        let (method, count) = (host::YIELD, host::YIELD_TSG);
        self.words
            .push(MethodHeader { op: SecOp::Immediate, subchannel: 0, method, count }.encode());
        self
    }

    /// Adds the channel's interrupt.
    pub fn interrupt(&mut self) -> &mut Self {
        self.push(0, NON_STALL_INTERRUPT, &[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_encode_as_in_a_driver() {
        let mut methods = Methods::new();
        methods.set_object(4, 0xc8b5).release(0x12_3456_7890, 7);
        assert_eq!(
            methods.words(),
            [0x2001_8000, 0xc8b5, 0x2005_0017, 0x3456_7890, 0x12, 7, 0, 0x10_0001]
        );
        assert_eq!(Methods::new().give_way().words(), [0x8003_0020]);
    }
}
