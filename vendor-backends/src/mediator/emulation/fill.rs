//! Constant fills of the copy class.

use mdev_core::abi::copy::remap;

use super::address_space::Access;
use super::context::Context;
use super::remap::RemapRegisters;
use crate::mediator::fault::Fault;

/// Length of the repeated pattern in bytes.
const PATTERN_BYTES: usize = 12 << 10;

/// Fill with elements that consist of constants.
#[derive(Clone, Debug)]
pub(super) struct Fill {
    registers: RemapRegisters,
    /// Repeated elements.
    pattern: Vec<u8>,
    /// Bytes of an element that are written; `None` if all are.
    mask: Option<Vec<bool>>,
    element: usize,
}

impl Fill {
    /// Creates a fill from the remap registers. Returns `None` if a component comes from the
    /// source: only constants are supported.
    pub fn new(registers: RemapRegisters) -> Option<Self> {
        let RemapRegisters { components, constants } = registers;
        let size = (components >> remap::COMPONENT_SIZE_SHIFT & 3) as usize + 1;
        let count = (components >> remap::NUM_DST_SHIFT & 3) as usize + 1;
        let (mut element, mut mask) = (Vec::new(), Vec::new());
        for shift in &remap::DST_SHIFTS[..count] {
            let constant = match components >> shift & 7 {
                remap::CONST_A => Some(constants[0]),
                remap::CONST_B => Some(constants[1]),
                remap::NO_WRITE => None,
                _ => return None,
            };
            element.extend_from_slice(&constant.unwrap_or_default().to_le_bytes()[..size]);
            mask.extend(std::iter::repeat_n(constant.is_some(), size));
        }
        let pattern = element.repeat(PATTERN_BYTES / element.len());
        let mask = mask.iter().any(|written| !written).then_some(mask);
        Some(Self { registers, pattern, mask, element: element.len() })
    }

    /// Returns the registers that describe the fill.
    pub fn registers(&self) -> RemapRegisters {
        self.registers
    }

    /// Returns whether all bytes of an element are written.
    pub fn writes_all(&self) -> bool {
        self.mask.is_none()
    }

    /// Returns the length of an element in bytes.
    pub fn element(&self) -> usize {
        self.element
    }

    /// Fills at most `at_most` bytes at `va`, which is `done` bytes into its line. Returns the
    /// number of bytes.
    pub fn write_range(
        &self,
        cx: Context<'_>,
        va: u64,
        done: u64,
        at_most: u64,
    ) -> Result<u64, Fault> {
        let phase = (done % self.pattern.len() as u64) as usize;
        let Some(mask) = &self.mask else {
            let bytes = &self.pattern[phase..];
            let to = cx.space.resolve(va, at_most.min(bytes.len() as u64), Access::Write)?;
            cx.hardware.write(cx.vgpu, to, &bytes[..to.len as usize])?;
            return Ok(to.len);
        };
        // Bytes outside the mask must not be read and written back: the guest may write them at the
        // same time.
        for (index, written) in mask.iter().enumerate() {
            if *written {
                cx.write(va.wrapping_add(index as u64), &self.pattern[index..=index])?;
            }
        }
        Ok(self.element as u64)
    }
}
