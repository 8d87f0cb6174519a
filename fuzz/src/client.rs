//! A GPU client that only keeps books: what is imported, mapped and created. Every eleventh call fails.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mdev_core::gpu::{
    Aperture, Apertures, Backing, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec,
    GpuCapabilities, GpuDescription, GpuError, GuestRam, Pending, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, Token, VgpuId};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};

const MIB: u64 = 1 << 20;

/// What a [`Bookkeeper`] holds for its owner.
#[derive(Debug, Default)]
pub struct Books {
    /// Length of each import.
    pub imports: BTreeMap<u32, u64>,
    /// Where something is mapped, and its length.
    pub mapped: BTreeMap<u64, u64>,
    /// Channels.
    pub channels: BTreeMap<u32, ChannelSpec>,
    calls: u32,
    next: u32,
}

/// The client.
#[derive(Debug)]
pub struct Bookkeeper {
    spec: ClientSpec,
    gpu: GpuDescription,
    apertures: Apertures,
    event: EventFd,
    books: Arc<Mutex<Books>>,
}

/// A file in memory.
pub fn memory(len: u64) -> OwnedFd {
    let file = File::from(memfd_create("memory", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
    file.set_len(len).expect("its length");
    file.into()
}

impl Bookkeeper {
    /// A client with 4 MiB of video memory, half of which is a framebuffer.
    pub fn new() -> (Box<Self>, Arc<Mutex<Books>>) {
        let books = Arc::<Mutex<Books>>::default();
        let vram = memory(4 * MIB);
        let framebuffer = Aperture { fd: vram.try_clone().expect("a copy"), len: 2 * MIB };
        let client = Self {
            spec: ClientSpec {
                vgpu: VgpuId(uuid::Uuid::from_u128(7)),
                vram_bytes: 4 * MIB,
                framebuffer_bytes: 2 * MIB,
                max_channels: 4,
                max_import_bytes: 64 * MIB,
            },
            gpu: GpuDescription {
                parent: "fuzz0".into(),
                model: "FUZZ".into(),
                name: "Books".into(),
                vram_bytes: 4 * MIB,
                capabilities: GpuCapabilities::all(),
                max_channels: 4,
                default_timeslice: Duration::from_millis(2),
            },
            apertures: Apertures {
                vram: Some(Aperture { fd: vram, len: 4 * MIB }),
                doorbell: Some(Aperture { fd: memory(0x1_0000), len: 0x1_0000 }),
                framebuffer: Some(framebuffer),
            },
            event: EventFd::new().expect("an eventfd"),
            books: Arc::clone(&books),
        };
        (Box::new(client), books)
    }

    /// The books, unless this call is one that fails.
    fn open(&self) -> Result<std::sync::MutexGuard<'_, Books>, GpuError> {
        let mut books = self.books.lock().expect("nobody panics");
        books.calls += 1;
        if books.calls.is_multiple_of(11) { Err(GpuError::Limit("mood")) } else { Ok(books) }
    }
}

impl Client for Bookkeeper {
    fn spec(&self) -> &ClientSpec {
        &self.spec
    }

    fn gpu(&self) -> &GpuDescription {
        &self.gpu
    }

    fn apertures(&self) -> &Apertures {
        &self.apertures
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        assert!(ram.len > 0 && (ram.len | ram.offset) % 4096 == 0, "{ram:?}");
        let mut books = self.open()?;
        books.next += 1;
        let id = books.next;
        books.imports.insert(id, ram.len);
        Ok(MemoryId(id))
    }

    /// Never fails for what is there: the device model has no way to keep memory that a client takes back.
    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        let mut books = self.books.lock().expect("nobody panics");
        books.imports.remove(&memory.0).map(drop).ok_or(GpuError::NotFound("memory"))
    }

    fn map(&mut self, va: GpuVa, len: u64, backing: Backing, _: bool) -> Result<(), GpuError> {
        assert!(len > 0 && (va.0 | len) % 4096 == 0, "{va} {len:#x}");
        let end = va.0.checked_add(len).expect("no overflow");
        assert!(end <= 1 << 40, "{va} {len:#x}");
        let mut books = self.open()?;
        let (offset, limit) = match backing {
            Backing::Guest { memory, offset } => {
                (offset, *books.imports.get(&memory.0).expect("imported"))
            }
            Backing::Vram { offset } => (offset, 4 * MIB),
        };
        assert!(offset.checked_add(len).expect("no overflow") <= limit, "{backing:?} {len:#x}");
        if books.mapped.range(..end).next_back().is_some_and(|(at, len)| at + len > va.0) {
            return Err(GpuError::Overlap(va));
        }
        books.mapped.insert(va.0, len);
        Ok(())
    }

    fn unmap(&mut self, va: GpuVa, len: u64) -> Result<(), GpuError> {
        let mut books = self.books.lock().expect("nobody panics");
        let before = books.mapped.len();
        books.mapped.retain(|start, _| *start < va.0 || *start - va.0 >= len);
        if books.mapped.len() == before { Err(GpuError::NotFound("mapping")) } else { Ok(()) }
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        assert!(spec.gpfifo_entries.is_power_of_two() && spec.gpfifo_entries <= 65536);
        assert!(spec.gpfifo.0 % 8 == 0 && spec.vector < 4, "{spec:?}");
        let mut books = self.open()?;
        books.next += 1;
        let id = books.next;
        books.channels.insert(id, *spec);
        Ok(ChannelHandle { id: ChannelId(id), token: Token(id) })
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.open()?.channels.remove(&id.0).map(drop).ok_or(GpuError::NotFound("channel"))
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        let found = self.open()?.channels.contains_key(&id.0);
        if found { Ok(ChannelStatus::default()) } else { Err(GpuError::NotFound("channel")) }
    }

    fn wake(&mut self, _: Token) -> Result<(), GpuError> {
        self.open().map(drop)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn set_interrupt(&mut self, vector: u32, _: Option<BorrowedFd<'_>>) -> Result<(), GpuError> {
        assert!(vector < 4, "there is no vector {vector}");
        self.open().map(drop)
    }

    fn take_pending(&mut self) -> Pending {
        Pending::empty()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        let mut books = self.books.lock().expect("nobody panics");
        books.channels.clear();
        books.mapped.clear();
        Ok(())
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(Usage::default())
    }
}
