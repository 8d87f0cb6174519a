//! Copies of the copy class that rearrange the components of each element.

use mdev_core::abi::copy::remap;

use serde::{Deserialize, Serialize};

use super::context::Context;
use crate::mediator::fault::Fault;

/// Elements that are copied between two checks of the run limit.
const MAX_ELEMENTS: u64 = 128;
/// Longest element: four components of four bytes.
const MAX_ELEMENT: usize = 16;

/// Origin of a component of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Component {
    /// A component of the source's element.
    Source(usize),
    Constant([u8; 4]),
    /// The component stays as it is.
    NotWritten,
}

/// Registers that describe the elements of a copy or fill.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct RemapRegisters {
    /// `SET_REMAP_COMPONENTS`.
    pub components: u32,
    /// `SET_REMAP_CONST_A` and `SET_REMAP_CONST_B`.
    pub constants: [u32; 2],
}

/// Copy with rearranged components.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remap {
    registers: RemapRegisters,
    /// Length of a component in bytes.
    size: usize,
    /// Components of the source's elements.
    sources: usize,
    targets: [Component; 4],
    count: usize,
}

impl Remap {
    /// Creates a copy from the remap registers. Returns `None` if a component does not exist.
    pub fn new(registers: RemapRegisters) -> Option<Self> {
        let RemapRegisters { components, constants } = registers;
        let field = |shift: u32| (components >> shift & 3) as usize + 1;
        let sources = field(remap::NUM_SRC_SHIFT);
        let mut targets = [Component::NotWritten; 4];
        let count = field(remap::NUM_DST_SHIFT);
        for (target, shift) in targets[..count].iter_mut().zip(remap::DST_SHIFTS) {
            *target = match components >> shift & 7 {
                remap::CONST_A => Component::Constant(constants[0].to_le_bytes()),
                remap::CONST_B => Component::Constant(constants[1].to_le_bytes()),
                remap::NO_WRITE => Component::NotWritten,
                source if (source as usize) < sources => Component::Source(source as usize),
                _ => return None,
            };
        }
        let size = field(remap::COMPONENT_SIZE_SHIFT);
        Some(Self { registers, size, sources, targets, count })
    }

    /// Returns the registers that describe the copy.
    pub fn registers(&self) -> RemapRegisters {
        self.registers
    }

    /// Returns the length of a written element in bytes.
    pub fn element(&self) -> usize {
        self.size * self.count
    }

    /// Copies the element that is `done` bytes into the target's line, and further ones up to
    /// `at_most` bytes. Returns the number of bytes.
    pub fn copy_range(
        &self,
        cx: Context<'_>,
        source: u64,
        target: u64,
        done: u64,
        at_most: u64,
    ) -> Result<u64, Fault> {
        let (from_bytes, to_bytes) = (self.size * self.sources, self.element());
        let first = done / to_bytes as u64;
        let elements = (at_most / to_bytes as u64).clamp(1, MAX_ELEMENTS);
        for index in first..first + elements {
            let from = source.wrapping_add(index * from_bytes as u64);
            let to = target.wrapping_add(index * to_bytes as u64);
            let mut element = [0; MAX_ELEMENT];
            if self.targets.iter().any(|target| matches!(target, Component::Source(_))) {
                cx.space.read(from, &mut element[..from_bytes])?;
            }
            for (place, component) in self.targets[..self.count].iter().enumerate() {
                let bytes = match component {
                    Component::Source(at) => &element[at * self.size..][..self.size],
                    Component::Constant(bytes) => &bytes[..self.size],
                    Component::NotWritten => continue,
                };
                cx.write(to.wrapping_add((place * self.size) as u64), bytes)?;
            }
        }
        Ok(elements * to_bytes as u64)
    }
}
