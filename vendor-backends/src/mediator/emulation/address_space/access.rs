//! Accesses of the engine to an address space. Each access is translated and checked.

use super::{Access, AddressSpace, MmuFault};

impl AddressSpace<'_> {
    /// Copies bytes from the address space.
    pub fn read(self, va: u64, out: &mut [u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < out.len() {
            let at = va.checked_add(done as u64).ok_or(MmuFault(va))?;
            let range = self.resolve(at, (out.len() - done) as u64, Access::Read)?;
            let end = done + range.len as usize;
            range.mapping.read(range.offset, &mut out[done..end]).ok_or(MmuFault(at))?;
            done = end;
        }
        Ok(())
    }

    /// Copies bytes to the address space.
    pub fn write(self, va: u64, bytes: &[u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < bytes.len() {
            let at = va.checked_add(done as u64).ok_or(MmuFault(va))?;
            let range = self.resolve(at, (bytes.len() - done) as u64, Access::Write)?;
            let end = done + range.len as usize;
            range.mapping.write(range.offset, &bytes[done..end]).ok_or(MmuFault(at))?;
            done = end;
        }
        Ok(())
    }

    /// Reads an aligned 32-bit word.
    pub fn load_u32(self, va: u64) -> Result<u32, MmuFault> {
        let range = self.resolve(va, 4, Access::Read)?;
        range.mapping.load_u32(range.offset).ok_or(MmuFault(va))
    }

    /// Reads an aligned 64-bit word.
    pub fn load_u64(self, va: u64) -> Result<u64, MmuFault> {
        let range = self.resolve(va, 8, Access::Read)?;
        range.mapping.load_u64(range.offset).ok_or(MmuFault(va))
    }

    /// Writes an aligned 32-bit word, with release ordering.
    pub fn store_u32(self, va: u64, value: u32) -> Result<(), MmuFault> {
        let range = self.resolve(va, 4, Access::Write)?;
        range.mapping.store_u32(range.offset, value).ok_or(MmuFault(va))
    }

    /// Writes an aligned 64-bit word, with release ordering.
    pub fn store_u64(self, va: u64, value: u64) -> Result<(), MmuFault> {
        let range = self.resolve(va, 8, Access::Write)?;
        range.mapping.store_u64(range.offset, value).ok_or(MmuFault(va))
    }

    /// Replaces an aligned 32-bit word by a function of it.
    pub fn update_u32(self, va: u64, new: impl FnMut(u32) -> u32) -> Result<(), MmuFault> {
        let range = self.resolve(va, 4, Access::Write)?;
        range.mapping.update_u32(range.offset, new).map(drop).ok_or(MmuFault(va))
    }

    /// Replaces an aligned 64-bit word by a function of it.
    pub fn update_u64(self, va: u64, new: impl FnMut(u64) -> u64) -> Result<(), MmuFault> {
        let range = self.resolve(va, 8, Access::Write)?;
        range.mapping.update_u64(range.offset, new).map(drop).ok_or(MmuFault(va))
    }

    /// Adds to an aligned 32-bit word and returns its previous value.
    pub fn add_u32(self, va: u64, value: u32) -> Result<u32, MmuFault> {
        let range = self.resolve(va, 4, Access::Write)?;
        range.mapping.add_u32(range.offset, value).ok_or(MmuFault(va))
    }
}
