//! Work that the fake GPU executes: semaphore releases of rings in system memory, which are those
//! of workers' probes. It is executed when a worker reads the log of context switches.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::numbers::class;
use mdev_core::abi::host::{self, GP_ENTRY_BYTES, GpEntry};
use mdev_core::abi::userd;

use super::PROBE_CONTEXT;
use super::objects::{Object, Objects};
use crate::ctxsw_record::START;

impl Objects {
    /// Executes the entries of all probes, unless the engine is held.
    pub fn serve_probes(&mut self) {
        if self.engine_held {
            return;
        }
        let channels = self.all.values().filter(|object| object.class == host::CLASS);
        let served: u64 = channels.filter_map(|channel| self.serve(channel)).sum();
        self.fetched += served;
        if served > 0 {
            let (own, now) = (u64::from(std::process::id()), self.clock_ns);
            self.log_context_switch(START, PROBE_CONTEXT, own, now);
        }
    }

    /// Executes the entries of a channel. Returns their number.
    fn serve(&self, channel: &Object) -> Option<u64> {
        let handle = *channel.uses.get(1)?;
        let memory = self.of_class(channel.client, handle, class::SYSTEM_MEMORY).ok()?;
        let file = memory.mapped_file.as_ref()?;
        let mapping = self
            .mappings
            .values()
            .find(|mapping| (mapping.client, mapping.memory) == (channel.client, handle))?;
        let userd = |word: u64| channel.userd_offset + word;
        let (gpfifo, entries) = channel.gpfifo;
        let (put, mut get) = (word(file, userd(userd::GP_PUT))?, word(file, userd(userd::GP_GET))?);
        let mut served = 0;
        while get != put && served < u64::from(entries) {
            let entry = gpfifo - mapping.va + u64::from(get) * GP_ENTRY_BYTES;
            let raw = u64::from(word(file, entry)?) | u64::from(word(file, entry + 4)?) << 32;
            let GpEntry::Segment { va, dwords } = GpEntry::decode(raw) else { return None };
            // The last five words are those of a semaphore.
            let at = va - mapping.va + u64::from(dwords - 5) * 4;
            let address = u64::from(word(file, at)?) | u64::from(word(file, at + 4)?) << 32;
            let payload = word(file, at + 8)?;
            file.write_all_at(&payload.to_le_bytes(), address - mapping.va).ok()?;
            get = (get + 1) % entries;
            file.write_all_at(&get.to_le_bytes(), userd(userd::GP_GET)).ok()?;
            served += 1;
        }
        Some(served)
    }
}

fn word(file: &File, at: u64) -> Option<u32> {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(u32::from_le_bytes(bytes))
}
