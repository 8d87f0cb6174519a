//! Control registers ([`crate::abi::control`], BAR 3), and trapped doorbells (BAR 1).

use super::FunctionSpec;
use crate::abi::control::{
    BAR_BYTES, CHECKPOINT_REASON_BYTES, CheckpointState, Features, MAGIC, Status, VERSION, reg,
};
use crate::abi::doorbell;
use crate::abi::{mailbox, queue};
use crate::gpu::{Client, GpuCapabilities, Pending};
use crate::ids::{GuestPa, Token};
use pci_registers::{Bank, BankState, RestoreError, Row, Width};

/// Control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlReg {
    Magic,
    Version,
    Features,
    Status,
    InterruptStatus,
    InterruptEnable,
    VramLow,
    VramHigh,
    MailboxLow,
    MailboxHigh,
    MailboxDoorbell,
    MailboxStatus,
    Wake,
    MaxChannels,
    TrappedDoorbells,
    QueueVersion,
    QueueStatus,
    QueueBaseLow,
    QueueBaseHigh,
    QueueSlots,
    QueueControl,
    QueueNotify,
    CheckpointRequest,
    CheckpointState,
    CheckpointReason,
    TypeName,
    Uuid,
    GpuName,
}

/// Register of the doorbell page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DoorbellReg {
    Token,
}

/// Side effects of a write to the control registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ControlEffect {
    /// Execute the request in the mailbox.
    pub mailbox: bool,
    /// Start or stop the control queue.
    pub queue: Option<bool>,
    /// The control queue has new submissions.
    pub notify: bool,
    /// Wake the engine for this channel.
    pub wake: Option<Token>,
    /// The pending conditions or the enabled interrupts have changed.
    pub interrupts: bool,
    /// Interrupts that the write enabled.
    pub newly_enabled: u32,
}

/// The control registers.
#[derive(Debug)]
pub(super) struct Control {
    bank: Bank<ControlReg>,
    /// Reason why the guest refuses a checkpoint.
    refusal: Vec<u8>,
}

impl Control {
    /// Returns the registers of a vGPU with these features.
    pub fn new(spec: &FunctionSpec, client: &dyn Client, features: Features) -> Self {
        let mut bank = Bank::new(BAR_BYTES, rows());
        let vram = client.spec().vram_bytes;
        bank.define(ControlReg::Features, features.bits());
        bank.define(ControlReg::VramLow, vram as u32);
        bank.define(ControlReg::VramHigh, (vram >> 32) as u32);
        bank.define(ControlReg::MaxChannels, client.spec().max_channels);
        bank.define_bytes(ControlReg::TypeName, spec.type_name.as_bytes());
        bank.define_bytes(ControlReg::Uuid, spec.vgpu.0.as_bytes());
        bank.define_bytes(ControlReg::GpuName, client.gpu().name.as_bytes());
        Self { bank, refusal: Vec::new() }
    }

    /// Returns the bank, for documentation.
    pub fn bank(&self) -> &Bank<ControlReg> {
        &self.bank
    }

    /// Replaces the registers by an image of another process.
    pub fn set_image(&mut self, image: &[u8]) {
        self.bank.set_image(image);
    }

    /// Reads bytes of BAR 3.
    pub fn read(&self, offset: u64, data: &mut [u8], lost: bool, queue: u32) {
        let status = if lost { Status::LOST } else { Status::READY };
        self.bank.read(offset, data, |id, value| match id {
            ControlReg::Status => status.bits(),
            ControlReg::QueueStatus => queue,
            _ => value,
        });
    }

    /// Writes bytes of BAR 3.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> ControlEffect {
        let mut effect = ControlEffect::default();
        self.bank.write(offset, data, |_, id, write| match id {
            ControlReg::InterruptStatus => effect.interrupts = true,
            ControlReg::InterruptEnable => {
                effect.interrupts = true;
                effect.newly_enabled = write.new & !write.old;
            }
            ControlReg::MailboxDoorbell => effect.mailbox = true,
            ControlReg::Wake => effect.wake = Some(Token(write.raw)),
            ControlReg::QueueControl => {
                let enable = |value: u32| value & queue::CONTROL_ENABLE != 0;
                let changed = enable(write.new) != enable(write.old);
                effect.queue = changed.then(|| enable(write.new));
            }
            ControlReg::QueueNotify => effect.notify = true,
            ControlReg::CheckpointReason => {
                let room = CHECKPOINT_REASON_BYTES.saturating_sub(self.refusal.len());
                let bytes = write.raw.to_le_bytes().into_iter().take(room);
                self.refusal.extend(bytes.filter(|byte| *byte != 0));
            }
            // Stored only, or read-only.
            ControlReg::MailboxLow
            | ControlReg::MailboxHigh
            | ControlReg::Magic
            | ControlReg::Version
            | ControlReg::Features
            | ControlReg::Status
            | ControlReg::VramLow
            | ControlReg::VramHigh
            | ControlReg::MailboxStatus
            | ControlReg::MaxChannels
            | ControlReg::TrappedDoorbells
            | ControlReg::QueueVersion
            | ControlReg::QueueStatus
            | ControlReg::QueueBaseLow
            | ControlReg::QueueBaseHigh
            | ControlReg::QueueSlots
            | ControlReg::CheckpointRequest
            | ControlReg::CheckpointState
            | ControlReg::TypeName
            | ControlReg::Uuid
            | ControlReg::GpuName => {}
        });
        effect
    }

    /// Returns true if an access includes the interrupt status.
    pub fn touches_interrupt_status(offset: u64, len: usize) -> bool {
        offset < reg::INTR_STATUS + 4 && offset.saturating_add(len as u64) > reg::INTR_STATUS
    }

    /// Returns the address of the mailbox page.
    pub fn mailbox(&self) -> GuestPa {
        let (low, high) = (ControlReg::MailboxLow, ControlReg::MailboxHigh);
        GuestPa(u64::from(self.bank.get(high)) << 32 | u64::from(self.bank.get(low)))
    }

    /// Shows the control queue.
    pub fn define_queue(&mut self) {
        self.bank.define(ControlReg::QueueVersion, queue::VERSION);
        let features = self.bank.get(ControlReg::Features) | Features::QUEUE.bits();
        self.bank.define(ControlReg::Features, features);
    }

    /// Returns the address of the control queue and its number of slots.
    pub fn queue(&self) -> (GuestPa, u32) {
        let (low, high) = (ControlReg::QueueBaseLow, ControlReg::QueueBaseHigh);
        let base = u64::from(self.bank.get(high)) << 32 | u64::from(self.bank.get(low));
        (GuestPa(base), self.bank.get(ControlReg::QueueSlots))
    }

    /// Returns the number of the request to checkpoint the guest's programs.
    pub fn checkpoint_request(&self) -> u32 {
        self.bank.get(ControlReg::CheckpointRequest)
    }

    /// Makes the next request.
    pub fn change_checkpoint_request(&mut self) {
        let next = self.checkpoint_request().wrapping_add(1);
        self.bank.set(ControlReg::CheckpointRequest, next);
    }

    /// Returns the guest's answer.
    pub fn checkpoint_state(&self) -> CheckpointState {
        match self.bank.get(ControlReg::CheckpointState) & 3 {
            0 => CheckpointState::None,
            1 => CheckpointState::Ready,
            2 => CheckpointState::Done,
            _ => CheckpointState::Refused,
        }
    }

    /// Returns the reason of the guest's refusal.
    pub fn refusal(&self) -> String {
        String::from_utf8_lossy(&self.refusal).into_owned()
    }

    /// Replaces the agent's answer to an earlier request.
    pub fn forget_answer(&mut self) {
        self.refusal.clear();
        self.bank.set(ControlReg::CheckpointState, CheckpointState::Ready as u32);
    }

    /// Sets the status of the last request.
    pub fn set_mailbox_status(&mut self, status: mailbox::Status) {
        self.bank.set(ControlReg::MailboxStatus, status as u32);
    }

    /// Adds pending conditions.
    pub fn raise(&mut self, pending: Pending) {
        let status = self.bank.get(ControlReg::InterruptStatus);
        self.bank.set(ControlReg::InterruptStatus, status | pending.bits());
    }

    /// Returns the conditions that may interrupt.
    pub fn enabled(&self) -> Pending {
        Pending::from_bits_truncate(self.bank.get(ControlReg::InterruptEnable))
    }

    /// Returns the pending conditions that may interrupt.
    pub fn interrupting(&self) -> Pending {
        let status = self.bank.get(ControlReg::InterruptStatus);
        Pending::from_bits_truncate(status) & self.enabled()
    }

    /// Counts a trapped doorbell or wake write.
    pub fn count_doorbell(&mut self) {
        let count = self.bank.get(ControlReg::TrappedDoorbells);
        self.bank.set(ControlReg::TrappedDoorbells, count.saturating_add(1));
    }

    /// Resets the registers to power-on values.
    pub fn reset(&mut self) {
        self.refusal.clear();
        self.bank.reset();
    }

    /// Returns the saved registers.
    pub fn save(&self) -> BankState {
        self.bank.save()
    }

    /// Checks a saved state without restoring it.
    pub fn check(&self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.check(state)
    }

    /// Restores a saved state.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.restore(state)
    }
}

/// Returns the features that the guest sees.
pub(super) fn features(spec: &FunctionSpec, client: &dyn Client) -> Features {
    let has = client.gpu().capabilities;
    let apertures = client.apertures();
    let mut features = Features::empty();
    features.set(Features::DISPLAY, spec.display.is_some());
    features.set(Features::COPY, has.contains(GpuCapabilities::COPY));
    features.set(Features::COMPUTE, has.contains(GpuCapabilities::COMPUTE));
    let mapped = spec.doorbell_mapped && has.contains(GpuCapabilities::DOORBELL_MAPPED);
    features.set(Features::DOORBELL_MAPPED, mapped && apertures.doorbell.is_some());
    features.set(Features::NEED_WAKEUP, has.contains(GpuCapabilities::NEED_WAKEUP));
    features.set(Features::VRAM_APERTURE, apertures.vram.is_some());
    features.set(Features::SOFT_PROGRAMS, has.contains(GpuCapabilities::SOFT_PROGRAMS));
    features.set(Features::FIXED_FUNCTION, has.contains(GpuCapabilities::FIXED_FUNCTION));
    features
}

/// Returns the doorbell page for trapped accesses. Reads return zero.
pub(super) fn doorbell_bank() -> Bank<DoorbellReg> {
    let row = Row::wo(
        DoorbellReg::Token,
        "NOTIFY_CHANNEL_PENDING",
        doorbell::TOKEN,
        Width::W32,
        "Token of a channel that has new work",
    );
    Bank::new(doorbell::PAGE_BYTES, vec![row])
}

fn rows() -> Vec<Row<ControlReg>> {
    [status_rows(), mailbox_rows(), queue_rows(), checkpoint_rows(), description_rows()].concat()
}

/// Identification, status, interrupts and video memory.
fn status_rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::W32;
    let pending = Pending::all().bits();
    vec![
        Row::ro(R::Magic, "MAGIC", reg::MAGIC, W32, MAGIC, "\"TSRA\""),
        Row::ro(R::Version, "VERSION", reg::VERSION, W32, VERSION, "Major << 16, minor"),
        Row::ro(R::Features, "FEATURES", reg::FEATURES, W32, 0, "Features of the vGPU: see below"),
        Row::ro(R::Status, "STATUS", reg::STATUS, W32, 1, "Bit 0 ready, bit 1 GPU lost"),
        Row::w1c(
            R::InterruptStatus,
            "INTR_STATUS",
            reg::INTR_STATUS,
            W32,
            0,
            pending,
            "Pending: bit 0 non-stall, bit 1 channel error, bit 2 GPU lost, bit 3 queue",
        ),
        Row::rw(
            R::InterruptEnable,
            "INTR_ENABLE",
            reg::INTR_ENABLE,
            W32,
            0,
            pending,
            "Pending bits that interrupt",
        ),
        Row::ro(R::VramLow, "VRAM_BYTES_LO", reg::VRAM_BYTES_LO, W32, 0, "Video memory, bytes"),
        Row::ro(R::VramHigh, "VRAM_BYTES_HI", reg::VRAM_BYTES_HI, W32, 0, "High half"),
    ]
}

/// Mailbox and wake-up.
fn mailbox_rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::W32;
    vec![
        Row::rw(
            R::MailboxLow,
            "MAILBOX_LO",
            reg::MAILBOX_LO,
            W32,
            0,
            0xffff_f000,
            "Guest-physical address of the mailbox page",
        ),
        Row::rw(R::MailboxHigh, "MAILBOX_HI", reg::MAILBOX_HI, W32, 0, u32::MAX, "High half"),
        Row::wo(
            R::MailboxDoorbell,
            "MAILBOX_DOORBELL",
            reg::MAILBOX_DOORBELL,
            W32,
            "Any write executes the request in the mailbox page",
        ),
        Row::ro(
            R::MailboxStatus,
            "MAILBOX_STATUS",
            reg::MAILBOX_STATUS,
            W32,
            0,
            "Status of the last request",
        ),
        Row::wo(R::Wake, "WAKE", reg::WAKE, W32, "Token of a channel; wakes a sleeping engine"),
    ]
}

/// Control queue.
fn queue_rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::W32;
    let (version, status) = (reg::QUEUE_VERSION, reg::QUEUE_STATUS);
    let (low, high) = (reg::QUEUE_BASE_LO, reg::QUEUE_BASE_HI);
    let (slots, control) = (reg::QUEUE_SLOTS, reg::QUEUE_CONTROL);
    let address = "Guest-physical address of the control queue";
    let enable = queue::CONTROL_ENABLE;
    let state = "State of the queue, and the reason of a failure";
    let notify = "Any write: the queue has new submissions";
    vec![
        Row::ro(R::QueueVersion, "QUEUE_VERSION", version, W32, 0, "Major << 16, minor; 0: none"),
        Row::ro(R::QueueStatus, "QUEUE_STATUS", status, W32, 0, state),
        Row::rw(R::QueueBaseLow, "QUEUE_BASE_LO", low, W32, 0, 0xffff_f000, address).unsaved(),
        Row::rw(R::QueueBaseHigh, "QUEUE_BASE_HI", high, W32, 0, u32::MAX, "High half").unsaved(),
        Row::rw(R::QueueSlots, "QUEUE_SLOTS", slots, W32, 0, u32::MAX, "Number of slots").unsaved(),
        Row::rw(R::QueueControl, "QUEUE_CONTROL", control, W32, 0, enable, "Bit 0: run").unsaved(),
        Row::wo(R::QueueNotify, "QUEUE_NOTIFY", reg::QUEUE_NOTIFY, W32, notify),
    ]
}

/// Checkpoints of the guest's programs. Not saved: a restored vGPU has no request, by which its
/// guest knows that it is to restore them.
fn checkpoint_rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::W32;
    let (request, state) = (reg::CHECKPOINT_REQUEST, reg::CHECKPOINT_STATE);
    let wanted = "Bit 0: the guest is to checkpoint its programs. Another number for each request";
    let answer = "0 no agent, 1 ready, 2 done, 3 refused";
    let reason = "The next four bytes of the reason of a refusal";
    vec![
        Row::ro(R::CheckpointRequest, "CHECKPOINT_REQUEST", request, W32, 0, wanted),
        Row::rw(R::CheckpointState, "CHECKPOINT_STATE", state, W32, 0, 3, answer).unsaved(),
        Row::wo(R::CheckpointReason, "CHECKPOINT_REASON", reg::CHECKPOINT_REASON, W32, reason),
    ]
}

/// Limits, counters and names.
fn description_rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::{Bytes, W32};
    let name = |len: u64| Bytes(len as u16);
    vec![
        Row::ro(
            R::MaxChannels,
            "MAX_CHANNELS",
            reg::MAX_CHANNELS,
            W32,
            0,
            "Maximum number of channels",
        ),
        Row::ro(
            R::TrappedDoorbells,
            "TRAPPED_DOORBELLS",
            reg::TRAPPED_DOORBELLS,
            W32,
            0,
            "Trapped doorbell and wake writes since reset",
        ),
        Row::ro(
            R::TypeName,
            "TYPE_NAME",
            reg::TYPE_NAME,
            name(reg::TYPE_NAME_BYTES),
            0,
            "The type's name, NUL-padded",
        ),
        Row::ro(R::Uuid, "UUID", reg::UUID, Bytes(16), 0, "The vGPU's UUID, RFC 9562 order"),
        Row::ro(
            R::GpuName,
            "GPU_NAME",
            reg::GPU_NAME,
            name(reg::GPU_NAME_BYTES),
            0,
            "The GPU's name, NUL-padded",
        ),
    ]
}
