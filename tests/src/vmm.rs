//! A VM of one CPU: enough of a hypervisor to run a few hundred bytes of code and to see each of its exits.
//!
//! The CPU starts in 32-bit protected mode with flat segments and no paging, so an address in the code is a
//! guest-physical one. RAM starts at 0. Whatever is [mapped](Machine::map) is reached without an exit; all other memory
//! is the caller's, access by access.

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

use crate::PATIENCE;

/// Where [`Code`] begins.
const CODE: u32 = 0x1000;
/// Interrupt descriptors, 8 bytes each.
const IDT: u32 = 0x3000;
/// Segment descriptors.
const GDT: u32 = 0x3800;
/// The stack grows down from here.
const STACK: u32 = 0x8000;
/// Writing here ends [`Machine::run`].
const PORT_DONE: u8 = 0x10;
/// Writing here says that the code waits for something.
const PORT_WAIT: u8 = 0x11;
/// The interrupt controller that a PC has had from the start.
const PIC_COMMAND: u8 = 0x20;
const PIC_DATA: u8 = 0x21;
/// Chooses which of its lines are level-triggered.
const PIC_LEVELS: u16 = 0x4d0;
/// The CPU's own interrupt controller.
const APIC_SPURIOUS: u32 = 0xfee0_00f0;
const APIC_EOI: u32 = 0xfee0_00b0;

/// The interrupt line that INTx is wired to.
pub const LINE: u32 = 5;
/// The CPU's vector for [`LINE`].
pub const LINE_VECTOR: u8 = 0x20 + LINE as u8;
/// The CPU's vector for the message.
pub const MESSAGE_VECTOR: u8 = 0x50;
/// The number that KVM knows the message by.
const MESSAGE_GSI: u32 = 24;

/// Machine code, put together instruction by instruction.
#[derive(Clone, Debug, Default)]
pub struct Code(Vec<u8>);

impl Code {
    /// None yet.
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

    /// Loads the register from an address.
    #[must_use]
    pub fn load(self, address: u32) -> Self {
        self.word(0xa1, address)
    }

    /// Stores the register at an address.
    #[must_use]
    pub fn store(self, address: u32) -> Self {
        self.word(0xa3, address)
    }

    /// Stores a value at an address.
    #[must_use]
    pub fn put(self, address: u32, value: u32) -> Self {
        self.word(0xb8, value).store(address)
    }

    /// Copies a word from one address to another.
    #[must_use]
    pub fn copy(self, from: u32, to: u32) -> Self {
        self.load(from).store(to)
    }

    /// Stores the register at an address, so many times.
    #[must_use]
    pub fn store_often(self, address: u32, times: u32) -> Self {
        // mov ecx, times; again: mov [address], eax; dec ecx; jnz again
        self.word(0xb9, times).store(address).bytes(&[0x49, 0x75, 0xf8])
    }

    fn out(self, port: u8, value: u8) -> Self {
        self.bytes(&[0xb0, value, 0xe6, port])
    }

    /// Waits until a word is not 0, with interrupts on.
    #[must_use]
    pub fn wait_for(self, address: u32) -> Self {
        // again: sti; nop; out PORT_WAIT; cmp dword [address], 0; je again; cli
        let code = self.bytes(&[0xfb, 0x90, 0xe6, PORT_WAIT, 0x83, 0x3d]);
        code.bytes(&address.to_le_bytes()).bytes(&[0x00, 0x74, 0xf3, 0xfa])
    }

    /// A full fence.
    #[must_use]
    pub fn fence(self) -> Self {
        // lock or dword [esp], 0: what every CPU and every emulator has.
        self.bytes(&[0xf0, 0x83, 0x0c, 0x24, 0x00])
    }

    /// Makes the CPU take interrupts of both controllers, [`LINE`] alone of the old one.
    #[must_use]
    pub fn take_interrupts(self) -> Self {
        let code = self.put(APIC_SPURIOUS, 0x1ff).out(PIC_COMMAND, 0x11).out(PIC_DATA, 0x20);
        let code = code.out(PIC_DATA, 4).out(PIC_DATA, 1).out(PIC_DATA, !(1 << LINE));
        let [low, high] = PIC_LEVELS.to_le_bytes();
        // mov al, level; mov dx, PIC_LEVELS; out dx, al
        code.bytes(&[0xb0, 1 << LINE, 0x66, 0xba, low, high, 0xee])
    }

    /// The end of an interrupt handler.
    fn end_of_interrupt(self, line: bool) -> Self {
        let code = if line { self.out(PIC_COMMAND, 0x20) } else { self.put(APIC_EOI, 0) };
        // pop eax; ret 8: not iret, which KVM cannot emulate in protected mode, and it emulates where the host's CPU
        // does not run the guest by itself. The segment is the same, no flag has changed, and sti is the waiter's.
        code.bytes(&[0x58, 0xc2, 0x08, 0x00])
    }
}

/// An access to memory that is not mapped.
#[derive(Debug)]
pub enum Access<'a> {
    /// To be filled in.
    Read(u64, &'a mut [u8]),
    /// To be taken.
    Write(u64, &'a [u8]),
}

/// The exits of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// Accesses to memory that is not mapped.
    pub memory: u64,
    /// Times that the code said it waits.
    pub waits: u64,
}

/// The machine.
#[derive(Debug)]
pub struct Machine {
    vm: VmFd,
    cpu: VcpuFd,
    ram: MmapRaw,
    mapped: Vec<MmapRaw>,
    /// Whether KVM has interrupt controllers and takes interrupts from eventfds.
    pub interrupts: bool,
}

/// Whether there is a KVM to run on, or why not.
pub fn probe() -> Result<()> {
    let kvm = Kvm::new().context("no /dev/kvm")?;
    ensure!(kvm.check_extension(Cap::UserMemory), "KVM has no memory slots");
    Ok(())
}

impl Machine {
    /// One with this RAM at address 0.
    pub fn new(ram: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let kvm = Kvm::new().context("Cannot open /dev/kvm")?;
        let vm = kvm.create_vm().context("Cannot make a VM")?;
        let wanted = [Cap::Irqchip, Cap::Irqfd, Cap::IrqRouting];
        let interrupts = wanted.into_iter().all(|cap| vm.check_extension(cap))
            && vm.create_irq_chip().is_ok()
            && route(&vm).is_ok();
        let ram = MmapOptions::new().len(bytes).map_raw(&ram)?;
        let cpu = vm.create_vcpu(0).context("Cannot make a CPU")?;
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
        // SAFETY: the memory is a mapping that the machine keeps for as long as the VM lives, and that this process
        // reaches through copies of bytes only.
        unsafe { self.vm.set_user_memory_region(region) }.context("KVM refuses a memory slot")
    }

    /// Lets the guest reach the beginning of a file at an address without an exit.
    pub fn map(&mut self, file: &impl AsFd, address: u64, bytes: usize) -> Result<()> {
        let mapping = MmapOptions::new().len(bytes).map_raw(&file.as_fd())?;
        let memory = mapping.as_mut_ptr();
        self.mapped.push(mapping);
        self.slot(self.mapped.len() as u32, address, memory, bytes)
    }

    /// Writes RAM.
    pub fn write(&mut self, address: u32, bytes: &[u8]) {
        assert!(address as usize + bytes.len() <= self.ram.len(), "beyond the end of RAM");
        // SAFETY: the range lies within the mapping, as was just checked, and `bytes` is no part of it.
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
        // SAFETY: the aligned word lies within the mapping, as was just checked, and may change at any time.
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

    /// What the CPU does on an interrupt, besides acknowledging it.
    pub fn on_interrupt(&mut self, vector: u8, address: u32, code: Code) {
        let mut whole = Code::new().bytes(&[0x50]); // push eax
        whole.0.extend(code.0);
        let whole = whole.end_of_interrupt(vector == LINE_VECTOR);
        self.write(address, &whole.0);
        let [a, b, c, d] = address.to_le_bytes();
        self.write(IDT + 8 * u32::from(vector), &[a, b, 8, 0, 0, 0x8e, c, d]);
    }

    /// Wires an eventfd to the message that [`MESSAGE_VECTOR`] is about.
    pub fn wire_message(&self, event: &EventFd) -> Result<()> {
        self.vm.register_irqfd(event, MESSAGE_GSI).context("KVM refuses an irqfd")
    }

    /// Wires an eventfd to [`LINE`], and another that is signalled when the guest has acknowledged it.
    pub fn wire_line(&self, event: &EventFd, acknowledged: &EventFd) -> Result<()> {
        self.vm
            .register_irqfd_with_resample(event, acknowledged, LINE)
            .context("KVM refuses an irqfd that is resampled")
    }

    /// Turns the guest's writes of four bytes at an address into a signal, without an exit to this process.
    pub fn wire_write(&self, event: &EventFd, address: u32) -> Result<()> {
        let place = IoEventAddress::Mmio(address.into());
        self.vm.register_ioevent(event, &place, NoDatamatch).context("KVM refuses an ioeventfd")
    }

    /// Runs code to its end, and hands each access to memory that is not mapped to `access`.
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
                    ensure!(start.elapsed() < PATIENCE, "The guest waits in vain");
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
                // Interrupt controllers that this KVM does not have.
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

/// Makes one message and one line known to KVM.
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
