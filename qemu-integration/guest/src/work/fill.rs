//! Fills: one word repeated by the copy engine.

use super::{Work, compare};
use crate::GuestError;
use crate::copy::fill;
use crate::device::Device;
use crate::memory::{Buffer, Home};
use crate::pushbuffer::Methods;

const VALUE: u32 = 0xc0ff_ee11;

/// Fill of a buffer except for its last word.
#[derive(Debug)]
pub struct Fill {
    to: Buffer,
    words: u32,
}

impl Fill {
    /// Fills `words` words of a buffer in `home`.
    pub fn new(device: &Device, home: Home, words: u32) -> Result<Self, GuestError> {
        Ok(Self { to: Buffer::new(device, home, (u64::from(words) + 1) * 4)?, words })
    }
}

impl Work for Fill {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.words) * 4.0, "bytes")
    }

    fn prepare(&self) {
        self.to.window().fill(0);
    }

    fn push(&self, methods: &mut Methods) {
        fill(methods, self.to.va(), VALUE, self.words);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let words: Vec<u32> = self.to.load(0, self.words as usize + 1);
        compare(self.name(), &words, |index| if index < self.words as usize { VALUE } else { 0 })
    }
}
