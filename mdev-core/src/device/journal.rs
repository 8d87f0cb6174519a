//! State of a running function, from which another process adopts it when this one has ended.
//!
//! It differs from a [saved vGPU](super::saved): the GPU, guest memory and eventfds are the same
//! before and after, and nothing stops. The state comes from a process of the same vGPU. It is
//! bounded, and its values can harm that vGPU only.

use std::borrow::Cow;
use std::os::fd::{BorrowedFd, OwnedFd};

use foreign_fds::ForeignFd;
use pci_registers::interrupts::{InterruptState, IrqEvent};
use serde::{Deserialize, Serialize};

use super::mailbox::Answer;
use super::{Scanout, Traps, VirtualFunction};
use crate::gpu::{Adoption, AnchoredDescriptor, GpuError};
use crate::ids::GuestPa;
use crate::mem::JournaledMemory;

/// State of a running function without guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledFunction<'a> {
    #[serde(borrow, with = "serde_bytes")]
    config: Cow<'a, [u8]>,
    #[serde(borrow, with = "serde_bytes")]
    control: Cow<'a, [u8]>,
    #[serde(borrow)]
    display: Option<JournaledDisplay<'a>>,
    irq: InterruptState,
    scanout: Scanout,
    traps: Traps,
    has_gpu_events: bool,
    direct: bool,
    active: bool,
    lost: bool,
    paused: bool,
    pristine: bool,
    answer: Option<Cow<'a, Answer>>,
}

/// State of a display head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JournaledDisplay<'a> {
    #[serde(borrow, with = "serde_bytes")]
    pub registers: Cow<'a, [u8]>,
    pub attribute_data: bool,
    pub retrace: u32,
}

/// What a descriptor of the client is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// Guest memory at an address.
    Memory(GuestPa),
    /// An interrupt.
    Event(IrqEvent),
}

impl VirtualFunction {
    /// Returns the position of the client, if another process can adopt it.
    pub fn position(&self) -> Option<u64> {
        self.client.lock().adoption()?.position()
    }

    /// Returns what is to be kept for the adopting process ([`Adoption::take_descriptors`]).
    pub fn take_descriptors(&self) -> Vec<AnchoredDescriptor> {
        self.client.lock().adoption().map(Adoption::take_descriptors).unwrap_or_default()
    }

    /// Returns the state.
    pub fn journaled(&self) -> JournaledFunction<'_> {
        JournaledFunction {
            config: self.config.bank().image().into(),
            control: self.control.bank().image().into(),
            display: self.display.as_ref().map(super::display::Display::journaled),
            irq: self.irq.state(),
            scanout: self.last_scanout,
            traps: self.traps,
            has_gpu_events: self.has_gpu_events,
            direct: self.direct,
            active: self.active,
            lost: self.lost,
            paused: self.paused,
            pristine: self.pristine,
            answer: self.answer.as_ref().map(Cow::Borrowed),
        }
    }

    /// Returns a number that changes if a read changes the state, other than its counters: reads
    /// collect the GPU's conditions.
    pub fn read_effects(&self) -> u64 {
        self.raises
    }

    /// Returns a number that changes with the mappings of guest memory and their imports.
    pub fn memory_generation(&self) -> u64 {
        self.memory.lock().generation()
    }

    /// Returns the mappings of guest memory.
    pub fn journaled_memory(&self) -> JournaledMemory {
        self.memory.lock().journaled()
    }

    /// Passes on the client's descriptors that [`Self::adopt`] takes.
    pub fn descriptors(&self, mut keep: impl FnMut(Descriptor, BorrowedFd<'_>)) {
        let memory = self.memory.lock();
        memory.files().for_each(|(address, file)| keep(Descriptor::Memory(address), file));
        self.irq.events().for_each(|(event, fd)| keep(Descriptor::Event(event), fd));
    }

    /// Notes that [`Self::journaled`] and [`Self::journaled_memory`] are recorded.
    pub fn recorded(&self) {
        if let Some(adoption) = self.client.lock().adoption() {
            adoption.record();
        }
    }

    /// Adopts a state of another process, with its mappings. `take` returns the descriptors
    /// that it has kept. Makes no request to the GPU: the first one repeats the other process'.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot start the thread that signals eventfds.
    pub fn adopt(
        &mut self,
        state: &JournaledFunction<'_>,
        memory: &JournaledMemory,
        mut take: impl FnMut(Descriptor) -> Option<OwnedFd>,
    ) -> Result<(), GpuError> {
        self.config.set_image(&state.config);
        self.control.set_image(&state.control);
        if let (Some(display), Some(state)) = (&mut self.display, &state.display) {
            display.adopt(state);
        }
        self.traps = state.traps;
        self.last_scanout = state.scanout;
        self.has_gpu_events = state.has_gpu_events;
        self.direct = state.direct;
        self.active = state.active;
        self.lost = state.lost;
        self.paused = state.paused;
        self.pristine = state.pristine;
        self.answer = state.answer.clone().map(Cow::into_owned);
        self.memory.lock().adopt(memory, |address| take(Descriptor::Memory(address)));
        let adopted =
            self.irq.adopt(&state.irq, |event| take(Descriptor::Event(event)).map(ForeignFd::from));
        adopted.map_err(|error| GpuError::Io(std::io::Error::other(error.to_string())))?;
        self.connect_msi_to_queue();
        Ok(())
    }
}
