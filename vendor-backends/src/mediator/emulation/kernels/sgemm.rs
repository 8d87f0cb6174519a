//! The matrix product `c = a * b`.

use kernel_loops::{TILE, Tile};
use mdev_core::abi::program::Sgemm;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use zerocopy::IntoBytes;

use super::Extent;
use crate::mediator::emulation::address_space::{AddressSpace, MmuFault};

/// A matrix product in progress: tile by tile of C, and for each tile slab by slab of A and B.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SgemmJob {
    pub params: Sgemm,
    rows: u32,
    columns: u32,
    row: u32,
    column: u32,
    depth: u32,
    #[serde(serialize_with = "save_tile", deserialize_with = "restore_tile")]
    sum: Tile,
}

impl SgemmJob {
    pub fn new(params: Sgemm, extent: Extent) -> Self {
        let (columns, rows) = (extent.bound(0, params.n), extent.bound(1, params.n));
        let sum = [0.0; TILE * TILE];
        Self { params, rows, columns, row: 0, column: 0, depth: 0, sum }
    }

    /// Returns whether a launch can lead to the state.
    pub fn is_valid(&self) -> bool {
        let Self { rows, columns, row, column, depth, .. } = *self;
        let n = self.params.n;
        let none = rows == 0 || columns == 0;
        none || (rows <= n && columns <= n && row < rows && column < columns && depth < n)
    }

    /// Runs one step. Returns true after the last step.
    pub fn step(&mut self, space: AddressSpace<'_>) -> Result<bool, MmuFault> {
        if self.rows == 0 || self.columns == 0 {
            return Ok(true);
        }
        let n = self.params.n;
        let rows = (self.rows - self.row).min(TILE as u32) as usize;
        let columns = (self.columns - self.column).min(TILE as u32) as usize;
        let depth = (n - self.depth).min(TILE as u32) as usize;
        let (mut a, mut b) = ([0f32; TILE * TILE], [0f32; TILE * TILE]);
        for row in 0..rows {
            let at = element(self.params.a, self.row + row as u32, self.depth, n);
            space.read(at, a[row * TILE..][..depth].as_mut_bytes())?;
        }
        for row in 0..depth {
            let at = element(self.params.b, self.depth + row as u32, self.column, n);
            space.read(at, b[row * TILE..][..columns].as_mut_bytes())?;
        }
        kernel_loops::multiply(&a, &b, &mut self.sum, rows, depth);
        self.depth += depth as u32;
        if self.depth < n {
            return Ok(false);
        }
        for row in 0..rows {
            let at = element(self.params.c, self.row + row as u32, self.column, n);
            space.write(at, self.sum[row * TILE..][..columns].as_bytes())?;
        }
        self.sum = [0.0; TILE * TILE];
        self.depth = 0;
        self.column += columns as u32;
        if self.column == self.columns {
            self.column = 0;
            self.row += rows as u32;
        }
        Ok(self.row == self.rows)
    }
}

fn save_tile<S: Serializer>(tile: &Tile, serializer: S) -> Result<S::Ok, S::Error> {
    tile.as_slice().serialize(serializer)
}

fn restore_tile<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Tile, D::Error> {
    let tile = Vec::deserialize(deserializer)?;
    tile.try_into().map_err(|_| de::Error::custom("a tile has another size"))
}

/// Returns the address of an element of a row-major square matrix of f32. A matrix may exceed the
/// 64-bit address space: such an address faults.
fn element(base: u64, row: u32, column: u32, n: u32) -> u64 {
    let index = u64::from(row) * u64::from(n) + u64::from(column);
    index.checked_mul(4).and_then(|offset| base.checked_add(offset)).unwrap_or(u64::MAX)
}
