//! Register values and the implementation of accesses to them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::row::{Access, Row, Width};

/// Write to a register, as passed to its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Value before the write.
    pub old: u32,
    /// Value after the write, with masks applied.
    pub new: u32,
    /// Written value, without masks; zero in bytes outside of the access.
    pub raw: u32,
    /// Mask of the bits within the access.
    pub touched: u32,
}

/// Saved registers of a bank, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BankState(pub BTreeMap<String, u32>);

/// Reason for refusing a saved state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The state lacks a saved register.
    #[error("Register {0} is missing")]
    Missing(&'static str),
    /// The state has a register that this device does not save.
    #[error("Register {0} is not a saved register of this device")]
    Unknown(String),
    /// A register has bits set that a guest cannot set.
    #[error("Register {name} cannot have the value {value:#x}")]
    Impossible {
        /// Name of the register.
        name: &'static str,
        /// Value in the state.
        value: u32,
    },
}

/// Registers of a device and their values.
pub struct Bank<R> {
    rows: Vec<Row<R>>,
    /// Current values, little-endian, each at its register's offset.
    image: Vec<u8>,
    /// Values after a reset.
    reset: Vec<u8>,
}

impl<R: Copy + PartialEq + fmt::Debug> Bank<R> {
    /// Returns a bank of `len` bytes. Bytes without a register read as zero and ignore writes.
    ///
    /// # Panics
    ///
    /// Panics if rows overlap or leave the bank. Tables are constants of the device; any test that
    /// creates the device finds the mistake.
    pub fn new(len: u64, mut rows: Vec<Row<R>>) -> Self {
        rows.sort_by_key(|row| row.offset);
        assert!(rows.windows(2).all(|pair| pair[0].end() <= pair[1].offset), "rows overlap");
        assert!(rows.last().is_none_or(|row| row.end() <= len), "a row leaves the bank");
        let mut bank = Self { rows, image: vec![0; len as usize], reset: Vec::new() };
        for index in 0..bank.rows.len() {
            let row = bank.rows[index];
            bank.store(&row, row.reset);
        }
        bank.reset = bank.image.clone();
        bank
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "banks are never empty")]
    pub fn len(&self) -> u64 {
        self.image.len() as u64
    }

    /// Returns the declarations, by offset.
    pub fn rows(&self) -> &[Row<R>] {
        &self.rows
    }

    /// Returns the value of a register.
    pub fn get(&self, id: R) -> u32 {
        self.row(id).map_or(0, |row| self.load(row))
    }

    /// Sets a register, ignoring its masks.
    pub fn set(&mut self, id: R, value: u32) {
        if let Some(row) = self.row(id).copied() {
            self.store(&row, value);
        }
    }

    /// Sets the current and the reset value of a register.
    pub fn define(&mut self, id: R, value: u32) {
        if let Some(row) = self.row(id).copied() {
            self.store(&row, value);
            let range = range(&row);
            self.reset[range.clone()].copy_from_slice(&self.image[range]);
        }
    }

    /// Sets the current and the reset value of a block of bytes. Longer data is truncated, shorter
    /// data padded with zeros.
    pub fn define_bytes(&mut self, id: R, bytes: &[u8]) {
        if let Some(row) = self.row(id) {
            let range = range(row);
            let len = bytes.len().min(range.len());
            for image in [&mut self.image, &mut self.reset] {
                image[range.clone()].fill(0);
                image[range.start..range.start + len].copy_from_slice(&bytes[..len]);
            }
        }
    }

    /// Resets all registers.
    pub fn reset(&mut self) {
        self.image.copy_from_slice(&self.reset);
    }

    /// Reads bytes. `on_read` is called for each touched register, in ascending order, with the
    /// stored value, and returns the value that the guest reads. Bytes beyond the bank read as
    /// zero.
    pub fn read(&self, offset: u64, data: &mut [u8], mut on_read: impl FnMut(R, u32) -> u32) {
        data.fill(0);
        let Some(start) = usize::try_from(offset).ok().filter(|at| *at < self.image.len()) else {
            return;
        };
        let end = self.image.len().min(start.saturating_add(data.len()));
        for row in &self.rows[self.touched(start, end)] {
            let register = range(row);
            let (from, to) = (register.start.max(start), register.end.min(end));
            let target = &mut data[from - start..to - start];
            if let Width::Bytes(_) = row.width {
                target.copy_from_slice(&self.image[from..to]);
            } else if row.access != Access::WriteOnly {
                let value = on_read(row.id, self.load(row)).to_le_bytes();
                target.copy_from_slice(&value[from - register.start..to - register.start]);
            }
        }
    }

    /// Writes bytes. For each touched register, in ascending order, the write is stored through the
    /// masks, and `on_write` is called and may change registers. Writes beyond the bank are
    /// ignored.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        mut on_write: impl FnMut(&mut Self, R, Write),
    ) {
        let Some(start) = usize::try_from(offset).ok().filter(|at| *at < self.image.len()) else {
            return;
        };
        let end = self.image.len().min(start.saturating_add(data.len()));
        for index in self.touched(start, end) {
            let row = self.rows[index];
            if row.access == Access::ReadOnly {
                continue;
            }
            let register = range(&row);
            let (from, to) = (register.start.max(start), register.end.min(end));
            let (mut raw, mut touched) = ([0; 4], [0; 4]);
            let bytes = from - register.start..to - register.start;
            raw[bytes.clone()].copy_from_slice(&data[from - start..to - start]);
            touched[bytes].fill(0xff);
            let (raw, touched) = (u32::from_le_bytes(raw), u32::from_le_bytes(touched));
            let old = self.load(&row);
            let writable = row.writable & touched;
            let new = (old & !writable | raw & writable) & !(raw & row.w1c);
            self.store(&row, new);
            on_write(self, row.id, Write { old, new, raw, touched });
        }
    }

    /// Returns the contents up to the last register, for the process that adopts the device.
    pub fn image(&self) -> &[u8] {
        let end = self.rows.last().map_or(0, Row::end);
        &self.image[..end as usize]
    }

    /// Replaces the contents by an [image](Self::image) of the same device, which an earlier
    /// version with fewer or more registers may have made.
    pub fn set_image(&mut self, image: &[u8]) {
        let len = image.len().min(self.image().len());
        self.image[..len].copy_from_slice(&image[..len]);
    }

    /// Returns the saved registers.
    pub fn save(&self) -> BankState {
        let saved = self.rows.iter().filter(|row| row.saved);
        BankState(saved.map(|row| (row.name.to_owned(), self.load(row))).collect())
    }

    /// Checks a saved state: all saved registers exist, no other registers exist, and bits outside
    /// of the masks have their reset values.
    pub fn check(&self, state: &BankState) -> Result<(), RestoreError> {
        for row in self.rows.iter().filter(|row| row.saved) {
            let value = *state.0.get(row.name).ok_or(RestoreError::Missing(row.name))?;
            let fixed = !(row.writable | row.w1c);
            if (value ^ self.reset_value(row)) & fixed != 0 {
                return Err(RestoreError::Impossible { name: row.name, value });
            }
        }
        let known = |name: &str| self.rows.iter().any(|row| row.saved && row.name == name);
        match state.0.keys().find(|name| !known(name)) {
            Some(name) => Err(RestoreError::Unknown(name.clone())),
            None => Ok(()),
        }
    }

    /// Resets the bank and restores the saved registers, all of them or none.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.check(state)?;
        self.reset();
        for index in 0..self.rows.len() {
            let row = self.rows[index];
            if let Some(value) = state.0.get(row.name).filter(|_| row.saved) {
                self.store(&row, *value);
            }
        }
        Ok(())
    }

    fn row(&self, id: R) -> Option<&Row<R>> {
        self.rows.iter().find(|row| row.id == id)
    }

    /// Returns the indices of the rows that `start..end` touches.
    fn touched(&self, start: usize, end: usize) -> Range<usize> {
        let first = self.rows.partition_point(|row| row.end() <= start as u64);
        let past = self.rows.partition_point(|row| row.offset < end as u64);
        first..past.max(first)
    }

    fn load(&self, row: &Row<R>) -> u32 {
        value(&self.image, row)
    }

    /// Returns the reset value of a register.
    pub(crate) fn reset_value(&self, row: &Row<R>) -> u32 {
        value(&self.reset, row)
    }

    fn store(&mut self, row: &Row<R>, value: u32) {
        if row.width.mask() != 0 {
            let range = range(row);
            let len = range.len();
            self.image[range].copy_from_slice(&value.to_le_bytes()[..len]);
        }
    }
}

fn range<R>(row: &Row<R>) -> Range<usize> {
    row.offset as usize..row.end() as usize
}

/// Returns a register's value in an image; 0 for a block.
fn value<R>(image: &[u8], row: &Row<R>) -> u32 {
    let mut bytes = [0; 4];
    if row.width.mask() != 0 {
        let range = range(row);
        bytes[..range.len()].copy_from_slice(&image[range]);
    }
    u32::from_le_bytes(bytes)
}

impl<R: Copy + PartialEq + fmt::Debug> fmt::Debug for Bank<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let registers = self.rows.iter().map(|row| (row.name, self.load(row)));
        f.debug_map().entries(registers).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Reg {
        Id,
        Control,
        Status,
        Notify,
        Name,
    }

    fn bank() -> Bank<Reg> {
        Bank::new(
            32,
            vec![
                Row::ro(Reg::Id, "ID", 0, Width::W16, 0x1234, ""),
                Row::rw(Reg::Control, "CONTROL", 4, Width::W32, 0x8000_0001, 0x00ff_ff00, ""),
                Row::w1c(Reg::Status, "STATUS", 8, Width::W8, 0xf0, 0x0f, ""),
                Row::wo(Reg::Notify, "NOTIFY", 12, Width::W32, ""),
                Row::ro(Reg::Name, "NAME", 16, Width::Bytes(8), 0, ""),
            ],
        )
    }

    #[test]
    fn an_access_can_touch_parts_of_several_registers() {
        let mut bank = bank();
        bank.define_bytes(Reg::Name, b"tessera");
        let mut data = [0xee; 13];
        bank.read(1, &mut data, |_, value| value);
        assert_eq!(data, [0x12, 0, 0, 1, 0, 0, 0x80, 0xf0, 0, 0, 0, 0, 0]);
        bank.read(18, &mut data[..3], |_, value| value);
        assert_eq!(&data[..3], b"sse");

        let mut seen = Vec::new();
        bank.write(5, &[0xaa, 0xbb, 0xcc, 0xff], |_, id, write| seen.push((id, write)));
        assert_eq!(bank.get(Reg::Control), 0x80bb_aa01);
        assert_eq!(
            seen[0].1,
            Write { old: 0x8000_0001, new: 0x80bb_aa01, raw: 0xccbb_aa00, touched: 0xffff_ff00 }
        );
        assert_eq!(seen[1].0, Reg::Status);
    }

    #[test]
    fn write_only_registers_read_as_zero_and_call_their_handler() {
        let mut bank = bank();
        let mut written = 0;
        bank.write(12, &7u32.to_le_bytes(), |_, _, write| written = write.raw);
        let mut data = [1; 4];
        bank.read(12, &mut data, |_, value| value);
        assert_eq!((written, data), (7, [0; 4]));
    }

    #[test]
    fn writing_one_clears_bits_of_the_mask() {
        let mut bank = bank();
        bank.set(Reg::Status, 0xff);
        bank.write(8, &[0x95], |_, _, _| ());
        assert_eq!(bank.get(Reg::Status), 0xfa);
    }

    #[test]
    fn restore_accepts_only_saved_state() {
        let mut bank = bank();
        bank.write(4, &[0xff; 4], |_, _, _| ());
        let state = bank.save();
        assert_eq!(state.0["CONTROL"], 0x80ff_ff01);
        bank.reset();
        bank.restore(&state).unwrap();
        assert_eq!(bank.get(Reg::Control), 0x80ff_ff01);

        let mut bad = state.clone();
        bad.0.insert("CONTROL".into(), 0);
        assert!(matches!(bank.restore(&bad), Err(RestoreError::Impossible { .. })));
        let mut bad = state.clone();
        bad.0.insert("ID".into(), 0x1234);
        assert_eq!(bank.restore(&bad), Err(RestoreError::Unknown("ID".into())));
        let mut bad = state;
        bad.0.remove("STATUS");
        assert_eq!(bank.restore(&bad), Err(RestoreError::Missing("STATUS")));
        assert_eq!(bank.get(Reg::Control), 0x80ff_ff01, "a refused state changes nothing");
    }

    proptest! {
        #[test]
        fn writes_never_change_bits_outside_of_the_masks(
            writes in prop::collection::vec((0u64..40, prop::collection::vec(any::<u8>(), 0..12)), 0..50)
        ) {
            let mut bank = bank();
            for (offset, data) in writes {
                bank.write(offset, &data, |_, _, _| ());
                let mut back = vec![0; data.len()];
                bank.read(offset, &mut back, |_, value| value);
            }
            prop_assert_eq!(bank.get(Reg::Id), 0x1234);
            prop_assert_eq!(bank.get(Reg::Control) & 0xff00_00ff, 0x8000_0001);
            prop_assert_eq!(bank.get(Reg::Status), 0xf0);
        }
    }
}
