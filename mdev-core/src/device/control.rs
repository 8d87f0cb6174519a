//! BAR 3: the control registers ([`crate::abi::control`]), and BAR 1 where it is trapped.

use super::FunctionSpec;
use crate::abi::control::{BAR_BYTES, Features, MAGIC, Status, VERSION, reg};
use crate::abi::doorbell;
use crate::abi::mailbox;
use crate::gpu::{Client, GpuCapabilities, Pending};
use crate::ids::{GuestPa, Token};
use crate::regs::{Bank, BankState, RestoreError, Row, Width};

/// A control register.
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
    TypeName,
    Uuid,
    GpuName,
}

/// A register of the doorbell page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DoorbellReg {
    Token,
}

/// What a write to the control registers asks of the rest of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ControlEffect {
    /// Execute the request in the mailbox.
    pub mailbox: bool,
    /// Wake the silicon for this channel.
    pub wake: Option<Token>,
    /// What is pending, or what may interrupt, has changed.
    pub interrupts: bool,
    /// Bits that were enabled just now.
    pub newly_enabled: u32,
}

/// The control registers.
#[derive(Debug)]
pub(super) struct Control {
    bank: Bank<ControlReg>,
}

impl Control {
    /// The registers of a vGPU with these features.
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
        Self { bank }
    }

    /// The registers, for documentation.
    pub fn bank(&self) -> &Bank<ControlReg> {
        &self.bank
    }

    /// Reads bytes of BAR 3.
    pub fn read(&self, offset: u64, data: &mut [u8], lost: bool) {
        let status = if lost { Status::LOST } else { Status::READY };
        self.bank.read(offset, data, |id, value| match id {
            ControlReg::Status => status.bits(),
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
            | ControlReg::TypeName
            | ControlReg::Uuid
            | ControlReg::GpuName => {}
        });
        effect
    }

    /// True where an access touches the interrupt status.
    pub fn touches_interrupt_status(offset: u64, len: usize) -> bool {
        offset < reg::INTR_STATUS + 4 && offset.saturating_add(len as u64) > reg::INTR_STATUS
    }

    /// Where the guest has put its mailbox.
    pub fn mailbox(&self) -> GuestPa {
        let (low, high) = (ControlReg::MailboxLow, ControlReg::MailboxHigh);
        GuestPa(u64::from(self.bank.get(high)) << 32 | u64::from(self.bank.get(low)))
    }

    /// Records how the last request went.
    pub fn set_mailbox_status(&mut self, status: mailbox::Status) {
        self.bank.set(ControlReg::MailboxStatus, status as u32);
    }

    /// Adds to what is pending.
    pub fn raise(&mut self, pending: Pending) {
        let status = self.bank.get(ControlReg::InterruptStatus);
        self.bank.set(ControlReg::InterruptStatus, status | pending.bits());
    }

    /// What may interrupt.
    pub fn enabled(&self) -> Pending {
        Pending::from_bits_truncate(self.bank.get(ControlReg::InterruptEnable))
    }

    /// What is pending and may interrupt.
    pub fn interrupting(&self) -> Pending {
        let status = self.bank.get(ControlReg::InterruptStatus);
        Pending::from_bits_truncate(status) & self.enabled()
    }

    /// Counts a trapped doorbell or wake write.
    pub fn count_doorbell(&mut self) {
        let count = self.bank.get(ControlReg::TrappedDoorbells);
        self.bank.set(ControlReg::TrappedDoorbells, count.saturating_add(1));
    }

    /// Back to power-on.
    pub fn reset(&mut self) {
        self.bank.reset();
    }

    /// Saved registers.
    pub fn save(&self) -> BankState {
        self.bank.save()
    }

    /// Checks a saved state without taking it.
    pub fn check(&self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.check(state)
    }

    /// Takes a saved state.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.restore(state)
    }
}

/// What the guest is told that the vGPU has.
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
    features.set(Features::FACTORIAL, has.contains(GpuCapabilities::FACTORIAL));
    features
}

/// The doorbell page, for accesses that are trapped. Reads give zero.
pub(super) fn doorbell_bank() -> Bank<DoorbellReg> {
    let row = Row::wo(
        DoorbellReg::Token,
        "NOTIFY_CHANNEL_PENDING",
        doorbell::TOKEN,
        Width::W32,
        "The token of a channel that has new work",
    );
    Bank::new(doorbell::PAGE_BYTES, vec![row])
}

fn rows() -> Vec<Row<ControlReg>> {
    use ControlReg as R;
    use Width::{Bytes, W32};
    let pending = Pending::all().bits();
    let name = |len: u64| Bytes(len as u16);
    vec![
        Row::ro(R::Magic, "MAGIC", reg::MAGIC, W32, MAGIC, "\"TSRA\""),
        Row::ro(R::Version, "VERSION", reg::VERSION, W32, VERSION, "Major << 16, minor"),
        Row::ro(R::Features, "FEATURES", reg::FEATURES, W32, 0, "What the vGPU has: see below"),
        Row::ro(R::Status, "STATUS", reg::STATUS, W32, 1, "Bit 0 ready, bit 1 GPU lost"),
        Row::w1c(
            R::InterruptStatus,
            "INTR_STATUS",
            reg::INTR_STATUS,
            W32,
            0,
            pending,
            "Pending: bit 0 non-stall, bit 1 channel error, bit 2 GPU lost",
        ),
        Row::rw(
            R::InterruptEnable,
            "INTR_ENABLE",
            reg::INTR_ENABLE,
            W32,
            0,
            pending,
            "Which pending bits interrupt",
        ),
        Row::ro(R::VramLow, "VRAM_BYTES_LO", reg::VRAM_BYTES_LO, W32, 0, "Video memory, bytes"),
        Row::ro(R::VramHigh, "VRAM_BYTES_HI", reg::VRAM_BYTES_HI, W32, 0, "Its high half"),
        Row::rw(
            R::MailboxLow,
            "MAILBOX_LO",
            reg::MAILBOX_LO,
            W32,
            0,
            0xffff_f000,
            "Guest-physical address of the mailbox page",
        ),
        Row::rw(R::MailboxHigh, "MAILBOX_HI", reg::MAILBOX_HI, W32, 0, u32::MAX, "Its high half"),
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
        Row::wo(R::Wake, "WAKE", reg::WAKE, W32, "A channel's token: wakes a sleeping silicon"),
        Row::ro(R::MaxChannels, "MAX_CHANNELS", reg::MAX_CHANNELS, W32, 0, "Channels at a time"),
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
