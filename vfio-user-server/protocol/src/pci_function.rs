//! Emulated PCI function from tables: configuration space, BARs and interrupts.
//!
//! A [`PciFunction`] implements the parts that all PCI devices share. Device authors declare an
//! identity, BARs and interrupts, forward configuration accesses and interrupt commands, and
//! implement the registers in the BARs (see [`pci_registers::Bank`]).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use pci_registers::capability::{express_endpoint, msi, power_management};
use pci_registers::{
    BankState, Bar, CONFIG_BYTES, ConfigEffect, ConfigSpace, ConfigTable, Identity, Interrupts,
    RestoreError,
};

use crate::device::{Area, IoEventFd, pci};
use crate::errno::Errno;
use crate::irq::{Irq, IrqCommand};
use crate::layout::{Layout, LayoutBuilder, LayoutError};

/// Largest number of MSI vectors (PCI Local Bus 3.0, section 6.8.1.3).
const MAX_MSI_VECTORS: u32 = 32;

/// Configuration space, BARs and interrupts of a PCI Express endpoint.
#[derive(Debug)]
pub struct PciFunction {
    layout: Layout,
    config: ConfigSpace,
    interrupts: Interrupts,
    intx_asserted: bool,
}

/// Builder of a [`PciFunction`].
#[derive(Debug)]
pub struct PciFunctionBuilder {
    identity: Identity,
    layout: LayoutBuilder,
    bars: Vec<Bar>,
    intx: bool,
    msi_vectors: u32,
}

impl PciFunction {
    /// Returns a builder without BARs and interrupts.
    pub fn builder(identity: Identity) -> PciFunctionBuilder {
        let layout = Layout::builder().trapped(pci::CONFIG, CONFIG_BYTES);
        PciFunctionBuilder { identity, layout, bars: Vec::new(), intx: false, msi_vectors: 0 }
    }

    /// Returns the regions and interrupts, for [`Device::layout`](crate::device::Device::layout).
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the configuration space.
    pub fn config(&self) -> &ConfigSpace {
        &self.config
    }

    /// Reads bytes of configuration space.
    pub fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data, self.intx_asserted);
    }

    /// Writes bytes of configuration space. If the effect is a reset, the device must perform it.
    #[must_use = "the device must perform a function-level reset"]
    pub fn config_write(&mut self, offset: u64, data: &[u8]) -> ConfigEffect {
        let effect = self.config.write(offset, data);
        if effect.intx_changed {
            self.update_intx();
        }
        effect
    }

    /// Executes a client's interrupt command.
    ///
    /// # Errors
    ///
    /// `EINVAL` for missing interrupts, `ENOTTY` for actions that the index does not support.
    pub fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        command.apply(index, &mut self.interrupts)?;
        self.update_intx();
        Ok(())
    }

    /// Signals an MSI vector, if the client has enabled MSI.
    pub fn signal_msi(&self, vector: u32) {
        self.interrupts.msi_signal(vector);
    }

    /// Sets the level of INTA. The client is signalled only while MSI is off and the guest has not
    /// disabled INTx.
    pub fn set_intx(&mut self, asserted: bool) {
        self.intx_asserted = asserted;
        self.update_intx();
    }

    /// Returns the eventfd with which the client unmasks INTx. The event loop of a function with
    /// INTx watches it and calls [`Self::on_intx_unmask`]. Interrupt commands replace the eventfd.
    pub fn intx_unmask_event(&self) -> Option<BorrowedFd<'_>> {
        self.interrupts.unmask_event()
    }

    /// Consumes the signal of [`Self::intx_unmask_event`] and unmasks INTx.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not an eventfd.
    pub fn on_intx_unmask(&mut self) -> io::Result<()> {
        self.interrupts.on_unmask()
    }

    /// Resets configuration space and deasserts INTx. Eventfds stay assigned.
    pub fn reset(&mut self) {
        self.config.reset();
        self.set_intx(false);
    }

    /// Drops all eventfds, after the client has disconnected.
    pub fn detach(&mut self) {
        self.interrupts.reset();
    }

    /// Returns the saved registers of configuration space.
    pub fn save(&self) -> BankState {
        self.config.save()
    }

    /// Restores saved registers, all of them or none.
    ///
    /// # Errors
    ///
    /// Fails if this function cannot have saved the state.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.config.restore(state)?;
        self.update_intx();
        Ok(())
    }

    /// Sets the INTx level from the device's level, the command register and MSI.
    fn update_intx(&mut self) {
        let enabled = self.interrupts.msi_granted() == 0 && !self.config.intx_disabled();
        self.interrupts.set_level(self.intx_asserted && enabled);
    }
}

impl PciFunctionBuilder {
    /// Adds a BAR whose accesses are trapped.
    #[must_use]
    pub fn bar(mut self, bar: Bar) -> Self {
        self.layout = self.layout.trapped(pci::BAR0 + u32::from(bar.index), bar.size);
        self.bars.push(bar);
        self
    }

    /// Adds a BAR that the client may map as a whole: the first bytes of `fd`.
    #[must_use]
    pub fn mapped_bar(self, bar: Bar, fd: OwnedFd) -> Self {
        self.partly_mapped_bar(bar, fd, 0, Vec::new())
    }

    /// Adds a BAR that lies in `fd` from `offset` on. The client may map the areas; accesses to the
    /// rest are trapped.
    #[must_use]
    pub fn partly_mapped_bar(
        mut self,
        bar: Bar,
        fd: OwnedFd,
        offset: u64,
        areas: Vec<Area>,
    ) -> Self {
        let index = pci::BAR0 + u32::from(bar.index);
        self.layout = self.layout.partly_mapped(index, bar.size, fd, offset, areas);
        self.bars.push(bar);
        self
    }

    /// Adds an ioeventfd to a BAR of the function.
    #[must_use]
    pub fn io_event_fd(mut self, bar: u8, event: IoEventFd) -> Self {
        self.layout = self.layout.io_event_fd(pci::BAR0 + u32::from(bar), event);
        self
    }

    /// Adds INTA.
    #[must_use]
    pub fn intx(mut self) -> Self {
        self.intx = true;
        self
    }

    /// Adds MSI with a number of vectors: a power of two, up to 32.
    #[must_use]
    pub fn msi(mut self, vectors: u32) -> Self {
        self.msi_vectors = vectors;
        self
    }

    /// Builds the function.
    ///
    /// # Errors
    ///
    /// Fails with the first mistake in the tables.
    pub fn build(self) -> Result<PciFunction, LayoutError> {
        let Self { identity, mut layout, bars, intx, msi_vectors } = self;
        check_bars(&bars)?;
        if intx {
            layout = layout.irq(pci::INTX, Irq::INTX);
        }
        let mut capabilities = vec![power_management()];
        if msi_vectors > 0 {
            if msi_vectors > MAX_MSI_VECTORS || !msi_vectors.is_power_of_two() {
                return Err(LayoutError::Vectors(msi_vectors));
            }
            layout = layout.irq(pci::MSI, Irq::message_signaled(msi_vectors));
            capabilities.push(msi(msi_vectors));
        }
        capabilities.push(express_endpoint());
        let layout = layout.build()?;
        let table = ConfigTable { identity, intx, bars: &bars, capabilities: &capabilities };
        Ok(PciFunction {
            layout,
            config: ConfigSpace::new(&table),
            interrupts: Interrupts::new(intx, msi_vectors),
            intx_asserted: false,
        })
    }
}

/// Checks that BARs do not share registers.
fn check_bars(bars: &[Bar]) -> Result<(), LayoutError> {
    let mut taken = [false; 6];
    for bar in bars {
        for register in bar.index..bar.index.saturating_add(bar.registers_taken()) {
            match taken.get_mut(usize::from(register)) {
                Some(slot @ false) => *slot = true,
                Some(true) => return Err(LayoutError::Duplicate(register.into())),
                None => return Err(LayoutError::Index(register.into())),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::eventfd::{EfdFlags, EventFd};
    use pci_registers::BarWidth;

    use super::*;
    use crate::fds::Fds;
    use crate::irq::IrqAction;

    const IDENTITY: Identity = Identity {
        vendor: 0x1b36,
        device: 0x0010,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        class: 0xff_00_00,
        revision: 1,
    };

    fn builder() -> PciFunctionBuilder {
        PciFunction::builder(IDENTITY).bar(Bar::registers(0, "Registers", 4096))
    }

    fn read32(function: &PciFunction, offset: u64) -> u32 {
        let mut data = [0; 4];
        function.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn assign(function: &mut PciFunction, index: u32, event: &EventFd) {
        let mut eventfds = Fds::default();
        eventfds.push(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let action = IrqAction::Trigger;
        function.set_irqs(index, IrqCommand::Assign { action, start: 0, eventfds }).unwrap();
    }

    fn event() -> EventFd {
        EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap()
    }

    #[test]
    fn layout_and_configuration_space_agree() {
        let vram = Bar {
            index: 2,
            doc: "Memory",
            size: 1 << 33,
            width: BarWidth::Bits64,
            prefetchable: true,
        };
        let mut function = builder().bar(vram).msi(4).build().unwrap();
        assert_eq!(function.layout().region(pci::BAR0 + 2).unwrap().size, 1 << 33);
        assert_eq!(function.layout().irq(pci::MSI), Irq::message_signaled(4));
        assert_eq!(function.layout().irq(pci::INTX), Irq::NONE);
        assert_eq!(read32(&function, 0), 0x0010_1b36);
        assert!(!function.config_write(0x10, &[0xff; 4]).reset);
        assert_eq!(read32(&function, 0x10), 0xffff_f000, "the BAR's size");
        assert_eq!(read32(&function, 0x3c) >> 8 & 0xff, 0, "no interrupt pin");
    }

    #[test]
    fn msi_replaces_intx_and_the_guest_can_disable_intx() {
        let mut function = builder().intx().msi(1).build().unwrap();
        let (pin, message) = (event(), event());
        assign(&mut function, pci::INTX, &pin);
        function.set_intx(true);
        assert_eq!(pin.read().unwrap(), 1);
        assert_eq!(read32(&function, 4) >> 19 & 1, 1, "interrupt status");
        assign(&mut function, pci::MSI, &message);
        function.signal_msi(0);
        assert_eq!(message.read().unwrap(), 1);
        function.reset();
        function.detach();
        function.signal_msi(0);
        assert!(message.read().is_err(), "eventfds are dropped when the client disconnects");

        assign(&mut function, pci::INTX, &pin);
        assert!(function.config_write(4, &[0, 4]).intx_changed);
        function.set_intx(true);
        assert!(pin.read().is_err(), "INTx is disabled");
    }

    #[test]
    fn restores_its_own_state_and_refuses_other_state() {
        let mut function = builder().msi(2).build().unwrap();
        assert!(!function.config_write(4, &[6]).reset);
        let state = function.save();
        function.reset();
        assert_eq!(read32(&function, 4) & 6, 0);
        function.restore(&state).unwrap();
        assert_eq!(read32(&function, 4) & 6, 6);
        assert!(builder().build().unwrap().restore(&state).is_err(), "the state has MSI registers");
    }

    #[test]
    fn io_event_fds_belong_to_declared_bars() {
        let doorbell = |size| IoEventFd {
            offset: 8,
            size,
            flags: 0,
            datamatch: 0,
            fd: event().as_fd().try_clone_to_owned().unwrap(),
        };
        let function = builder().io_event_fd(0, doorbell(4)).build().unwrap();
        assert_eq!(function.layout().io_event_fds(pci::BAR0).len(), 1);
        let wrong = [builder().io_event_fd(1, doorbell(4)), builder().io_event_fd(0, doorbell(3))];
        for (builder, region) in wrong.into_iter().zip([1, 0]) {
            assert_eq!(builder.build().unwrap_err(), LayoutError::IoEventFd(region));
        }
    }

    #[test]
    fn mistakes_in_tables_are_named() {
        let at = |index, width| Bar { index, doc: "", size: 4096, width, prefetchable: false };
        let cases = [
            (builder().bar(at(0, BarWidth::Bits32)), LayoutError::Duplicate(0)),
            (builder().bar(at(6, BarWidth::Bits32)), LayoutError::Index(6)),
            (builder().bar(at(5, BarWidth::Bits64)), LayoutError::Index(6)),
            (
                builder().bar(at(2, BarWidth::Bits64)).bar(at(3, BarWidth::Bits32)),
                LayoutError::Duplicate(3),
            ),
            (builder().bar(Bar::registers(1, "", 48)), LayoutError::Bar(1)),
            (builder().msi(3), LayoutError::Vectors(3)),
            (builder().msi(64), LayoutError::Vectors(64)),
        ];
        for (builder, error) in cases {
            assert_eq!(builder.build().unwrap_err(), error);
        }
    }
}
