//! A guest of a vGPU with a display, without a driver: registers and pixels are accessed directly.

#![allow(
    clippy::cast_ptr_alignment,
    reason = "mappings begin with pages, and their lengths are whole words"
)]

use std::path::Path;

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use vfio_user::Client;

/// A guest's display head: registers by messages, pixels by stores.
pub struct Head {
    pub client: Client,
    memory: MmapRaw,
    pub offset: u64,
}

impl Head {
    pub fn attach(socket: &Path) -> Self {
        let mut client = Client::new(socket).unwrap();
        // Enables memory space as firmware does.
        client.region_write(7, 4, &[2, 0]).unwrap();
        let region = client.region(0).unwrap();
        let file = region.file_offset.as_ref().unwrap();
        let offset = file.start();
        // vfio_user leaves the socket open on exec, and the next manager would inherit it.
        fcntl(file.file(), FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        let memory = MmapOptions::new()
            .offset(offset)
            .len(region.size as usize)
            .map_raw(file.file())
            .unwrap();
        // Only the framebuffer can be mapped, not the registers.
        let mapped = |index| client.region(index).is_some_and(|it| it.file_offset.is_some());
        assert_eq!((1..9).find(|index| mapped(*index)), None);
        Self { client, memory, offset }
    }

    /// Sets a mode as bochs-drm does, and fills all of the memory with a colour.
    pub fn draw(&mut self, width: u16, height: u16, colour: u32) {
        self.client.region_read(2, 0x41a, &mut [0]).unwrap();
        self.client.region_write(2, 0x400, &[0x20]).unwrap();
        for (register, value) in
            [(0x508, 0), (0x506, 32), (0x502, width), (0x504, height), (0x508, 0x41)]
        {
            self.client.region_write(2, register, &value.to_le_bytes()).unwrap();
        }
        for place in 0..self.pixels() {
            // SAFETY: the address is in the mapping, and this process holds no reference into it.
            unsafe { self.memory.as_mut_ptr().cast::<u32>().add(place).write_volatile(colour) };
        }
    }

    fn pixels(&self) -> usize {
        self.memory.len() / 4
    }

    /// Returns whether all of the memory has one colour.
    pub fn is_all(&self, colour: u32) -> bool {
        // SAFETY: as above.
        let at = |place| unsafe { self.memory.as_ptr().cast::<u32>().add(place).read_volatile() };
        (0..self.pixels()).all(|place| at(place) == colour)
    }
}
