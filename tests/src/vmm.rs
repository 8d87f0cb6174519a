//! A VM with one CPU: enough of a hypervisor to run a few hundred bytes of code and to see each
//! exit.
//!
//! The CPU starts in 32-bit protected mode with flat segments and without paging, so addresses in
//! the code are guest-physical. RAM starts at 0. [Mapped](Machine::map) memory is accessed without
//! an exit; the caller handles each access to other memory.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_PIC_MASTER, KvmIrqRouting,
    kvm_irq_routing_entry, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use memmap2::{MmapOptions, MmapRaw};
use vmm_sys_util::eventfd::EventFd;

use crate::TIMEOUT;

/// Address of [`Code`].
const CODE: u32 = 0x1000;
/// Address of interrupt descriptors, 8 bytes each.
const IDT: u32 = 0x3000;
/// Address of segment descriptors.
const GDT: u32 = 0x3800;
/// Initial stack pointer.
const STACK: u32 = 0x8000;
/// Port that ends [`Machine::run`] when written.
const PORT_DONE: u8 = 0x10;
/// Port that reports that the code waits, when written.
const PORT_WAIT: u8 = 0x11;
/// Ports of the master 8259 interrupt controller.
const PIC_COMMAND: u8 = 0x20;
const PIC_DATA: u8 = 0x21;
/// Port that selects level-triggered lines.
const PIC_LEVELS: u16 = 0x4d0;
/// Address of the local APIC.
const APIC_SPURIOUS: u32 = 0xfee0_00f0;
const APIC_EOI: u32 = 0xfee0_00b0;

/// Interrupt line of INTx.
pub const LINE: u32 = 5;
/// CPU vector of [`LINE`].
pub const LINE_VECTOR: u8 = 0x20 + LINE as u8;
/// CPU vector of the MSI message.
pub const MESSAGE_VECTOR: u8 = 0x50;
/// KVM's route number of the message.
const MESSAGE_GSI: u32 = 24;

/// Machine code, assembled instruction by instruction.
#[derive(Clone, Debug, Default)]
pub struct Code(Vec<u8>);

impl Code {
    /// Returns empty code.
    pub fn new() -> Self {
        Self::default()
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn word(self, opcode: u8, word: u32) -> Self {
        self.bytes(&[opcode]).bytes(&word.to_le_bytes())
    }

    /// Loads eax from an address.
    #[must_use]
    pub fn load(self, address: u32) -> Self {
        self.word(0xa1, address)
    }

    /// Stores eax at an address.
    #[must_use]
    pub fn store(self, address: u32) -> Self {
        self.word(0xa3, address)
    }

    /// Stores a value at an address.
    #[must_use]
    pub fn put(self, address: u32, value: u32) -> Self {
        self.word(0xb8, value).store(address)
    }

    /// Copies a word between addresses.
    #[must_use]
    pub fn copy(self, from: u32, to: u32) -> Self {
        self.load(from).store(to)
    }

    /// Stores eax at an address `times` times.
    #[must_use]
    pub fn store_often(self, address: u32, times: u32) -> Self {
        // mov ecx, times; again: mov [address], eax; dec ecx; jnz again
        self.word(0xb9, times).store(address).bytes(&[0x49, 0x75, 0xf8])
    }

    fn out(self, port: u8, value: u8) -> Self {
        self.bytes(&[0xb0, value, 0xe6, port])
    }

    /// Waits with interrupts enabled until a word is not 0.
    #[must_use]
    pub fn wait_for(self, address: u32) -> Self {
        // again: sti; nop; out PORT_WAIT; cmp dword [address], 0; je again; cli
        let code = self.bytes(&[0xfb, 0x90, 0xe6, PORT_WAIT, 0x83, 0x3d]);
        code.bytes(&address.to_le_bytes()).bytes(&[0x00, 0x74, 0xf3, 0xfa])
    }

    /// Appends a full memory fence.
    #[must_use]
    pub fn fence(self) -> Self {
        // lock or dword [esp], 0: every CPU and emulator has this instruction.
        self.bytes(&[0xf0, 0x83, 0x0c, 0x24, 0x00])
    }

    /// Enables interrupts of both controllers; of the 8259's lines only [`LINE`].
    #[must_use]
    pub fn take_interrupts(self) -> Self {
        let code = self.put(APIC_SPURIOUS, 0x1ff).out(PIC_COMMAND, 0x11).out(PIC_DATA, 0x20);
        let code = code.out(PIC_DATA, 4).out(PIC_DATA, 1).out(PIC_DATA, !(1 << LINE));
        let [low, high] = PIC_LEVELS.to_le_bytes();
        // mov al, level; mov dx, PIC_LEVELS; out dx, al
        code.bytes(&[0xb0, 1 << LINE, 0x66, 0xba, low, high, 0xee])
    }

    /// Appends the end of an interrupt handler.
    fn end_of_interrupt(self, line: bool) -> Self {
        let code = if line { self.out(PIC_COMMAND, 0x20) } else { self.put(APIC_EOI, 0) };
        // pop eax; ret 8 instead of iret: KVM emulates code in protected mode if the host's CPU
        // cannot run it, and cannot emulate iret. Segment and flags are unchanged, and the waiting
        // code enables interrupts.
        code.bytes(&[0x58, 0xc2, 0x08, 0x00])
    }
}

/// An access to unmapped memory.
#[derive(Debug)]
pub enum Access<'a> {
    /// A read; the caller fills the bytes.
    Read(u64, &'a mut [u8]),
    /// A write; the caller takes the bytes.
    Write(u64, &'a [u8]),
}

/// Exits of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// Accesses to unmapped memory.
    pub memory: u64,
    /// Reports that the code waits.
    pub waits: u64,
}

/// A VM with one CPU.
#[derive(Debug)]
pub struct Machine {
    vm: VmFd,
    cpu: VcpuFd,
    ram: MmapRaw,
    mapped: Vec<MmapRaw>,
    /// Whether KVM has interrupt controllers and accepts interrupts from eventfds.
    pub interrupts: bool,
}

/// Checks whether KVM is usable. The error says why not.
pub fn probe() -> Result<()> {
    let kvm = Kvm::new().context("no /dev/kvm")?;
    ensure!(kvm.check_extension(Cap::UserMemory), "KVM has no memory slots");
    Ok(())
}

impl Machine {
    /// Creates a machine with this RAM at address 0.
    pub fn new(ram: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let kvm = Kvm::new().context("Cannot open /dev/kvm")?;
        let vm = kvm.create_vm().context("Cannot create a VM")?;
        let wanted = [Cap::Irqchip, Cap::Irqfd, Cap::IrqRouting];
        let interrupts = wanted.into_iter().all(|cap| vm.check_extension(cap))
            && vm.create_irq_chip().is_ok()
            && route(&vm).is_ok();
        let ram = MmapOptions::new().len(bytes).map_raw(&ram)?;
        let cpu = vm.create_vcpu(0).context("Cannot create a CPU")?;
        let mut machine = Self { vm, cpu, ram, mapped: Vec::new(), interrupts };
        machine.slot(0, 0, machine.ram.as_mut_ptr(), bytes)?;
        machine.protected_mode()?;
        Ok(machine)
    }

    fn slot(&mut self, slot: u32, address: u64, memory: *mut u8, bytes: usize) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: address,
            memory_size: bytes as u64,
            userspace_addr: memory as u64,
        };
        // SAFETY: the machine keeps the mapping for the lifetime of the VM, and this process
        // accesses it only by copying bytes.
        unsafe { self.vm.set_user_memory_region(region) }.context("KVM refuses a memory slot")
    }

    /// Maps the beginning of a file at a guest-physical address, so that accesses cause no exit.
    pub fn map(&mut self, file: &impl AsFd, address: u64, bytes: usize) -> Result<()> {
        let mapping = MmapOptions::new().len(bytes).map_raw(&file.as_fd())?;
        let memory = mapping.as_mut_ptr();
        self.mapped.push(mapping);
        self.slot(self.mapped.len() as u32, address, memory, bytes)
    }

    /// Writes RAM.
    pub fn write(&mut self, address: u32, bytes: &[u8]) {
        assert!(address as usize + bytes.len() <= self.ram.len(), "beyond the end of RAM");
        // SAFETY: the range was checked above, and `bytes` does not overlap the mapping.
        let start = unsafe { self.ram.as_mut_ptr().add(address as usize) };
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    }

    /// Reads a word of RAM.
    #[allow(
        clippy::cast_ptr_alignment,
        reason = "the address is checked, and the mapping is a page's"
    )]
    pub fn word(&self, address: u32) -> u32 {
        assert!(address.is_multiple_of(4), "a word is aligned");
        assert!(address as usize + 4 <= self.ram.len(), "beyond the end of RAM");
        // SAFETY: the aligned word was checked above. The guest may change it at any time.
        unsafe { self.ram.as_ptr().add(address as usize).cast::<u32>().read_volatile() }
    }

    fn protected_mode(&mut self) -> Result<()> {
        let flat = |kind, selector| kvm_segment {
            limit: u32::MAX,
            selector,
            type_: kind,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..kvm_segment::default()
        };
        let (code, data) = (flat(0xb, 8), flat(0x3, 16));
        for (n, descriptor) in
            [0, 0x00cf_9b00_0000_ffff_u64, 0x00cf_9300_0000_ffff].iter().enumerate()
        {
            self.write(GDT + 8 * n as u32, &descriptor.to_le_bytes());
        }
        let mut special = self.cpu.get_sregs()?;
        (special.cs, special.ss) = (code, data);
        (special.ds, special.es, special.fs, special.gs) = (data, data, data, data);
        special.gdt.base = GDT.into();
        special.gdt.limit = 3 * 8 - 1;
        special.idt.base = IDT.into();
        special.idt.limit = 256 * 8 - 1;
        special.cr0 = 0x11;
        self.cpu.set_sregs(&special).context("Cannot set up the CPU")
    }

    /// Sets the code that an interrupt runs before it is acknowledged.
    pub fn on_interrupt(&mut self, vector: u8, address: u32, code: Code) {
        let mut whole = Code::new().bytes(&[0x50]); // push eax
        whole.0.extend(code.0);
        let whole = whole.end_of_interrupt(vector == LINE_VECTOR);
        self.write(address, &whole.0);
        let [a, b, c, d] = address.to_le_bytes();
        self.write(IDT + 8 * u32::from(vector), &[a, b, 8, 0, 0, 0x8e, c, d]);
    }

    /// Connects an eventfd to the message of [`MESSAGE_VECTOR`].
    pub fn wire_message(&self, event: &EventFd) -> Result<()> {
        self.vm.register_irqfd(event, MESSAGE_GSI).context("KVM refuses an irqfd")
    }

    /// Connects an eventfd to [`LINE`], and another that signals the guest's acknowledgement.
    pub fn wire_line(&self, event: &EventFd, acknowledged: &EventFd) -> Result<()> {
        self.vm
            .register_irqfd_with_resample(event, acknowledged, LINE)
            .context("KVM refuses an irqfd that is resampled")
    }

    /// Makes 4-byte writes at an address signal an eventfd, without an exit to this process.
    pub fn wire_write(&self, event: &EventFd, address: u32) -> Result<()> {
        let place = IoEventAddress::Mmio(address.into());
        self.vm.register_ioevent(event, &place, NoDatamatch).context("KVM refuses an ioeventfd")
    }

    /// Runs code to its end and passes each access to unmapped memory to `access`.
    pub fn run(&mut self, code: Code, mut access: impl FnMut(Access<'_>)) -> Result<Exits> {
        self.write(CODE, &code.out(PORT_DONE, 0).0);
        let mut registers = self.cpu.get_regs()?;
        (registers.rip, registers.rsp, registers.rflags) = (CODE.into(), STACK.into(), 2);
        self.cpu.set_regs(&registers)?;
        let mut exits = Exits::default();
        let start = Instant::now();
        loop {
            match self.cpu.run().context("The CPU does not run")? {
                VcpuExit::MmioRead(address, data) => {
                    exits.memory += 1;
                    access(Access::Read(address, data));
                }
                VcpuExit::MmioWrite(address, data) => {
                    exits.memory += 1;
                    access(Access::Write(address, data));
                }
                VcpuExit::IoOut(port, _) if port == u16::from(PORT_DONE) => return Ok(exits),
                VcpuExit::IoOut(port, _) if port == u16::from(PORT_WAIT) => {
                    exits.waits += 1;
                    ensure!(start.elapsed() < TIMEOUT, "The guest waited too long");
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
                // Interrupt controllers that this KVM lacks.
                VcpuExit::IoOut(..) | VcpuExit::Intr => {}
                other => {
                    let what = format!("{other:?}");
                    let at = self.cpu.get_regs()?.rip;
                    bail!("The guest has crashed at {at:#x}: {what}");
                }
            }
        }
    }
}

/// Registers one message and one line with KVM.
fn route(vm: &VmFd) -> Result<()> {
    let mut message = kvm_irq_routing_entry {
        gsi: MESSAGE_GSI,
        type_: KVM_IRQ_ROUTING_MSI,
        ..kvm_irq_routing_entry::default()
    };
    message.u.msi.address_lo = 0xfee0_0000;
    message.u.msi.data = MESSAGE_VECTOR.into();
    let mut line = kvm_irq_routing_entry {
        gsi: LINE,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..kvm_irq_routing_entry::default()
    };
    line.u.irqchip.irqchip = KVM_IRQCHIP_PIC_MASTER;
    line.u.irqchip.pin = LINE;
    let routing =
        KvmIrqRouting::from_entries(&[message, line]).context("Two routes are too many")?;
    Ok(vm.set_gsi_routing(&routing)?)
}
