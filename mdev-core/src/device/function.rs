//! The virtual function.

use std::os::fd::OwnedFd;
use std::sync::MutexGuard;

use pci_registers::capability::{express_endpoint, msi, power_management};
use pci_registers::{Bank, Bar, CONFIG_BYTES, ConfigSpace, ConfigTable, Interrupts};

use super::control::{self, Control, DoorbellReg};
use super::display::{self, Display};
use super::identity;
use super::interrupts::Delivery;
use super::mailbox::{self, Answer, Environment};
use super::queue::ControlQueue;
use super::region::BarKind;
use super::window::Window;
use super::{
    AccessError, DeviceError, FunctionSpec, Region, RegionEvent, RegionInfo, RegionMapping,
    Scanout, Traps,
};
use crate::abi::control::{Features, VECTORS, reg};
use crate::abi::doorbell;
use crate::abi::mailbox::Status;
use crate::gpu::{Aperture, Client, ClientHandle, GpuError, Pending, Usage};
use crate::ids::Token;
use crate::mem::{ImportLimits, SharedGuestMemory};

/// One vGPU as a PCI device.
///
/// It owns its [`Client`] and is independent of a protocol. A vfio-user session makes one call at a
/// time. Calls return quickly; only calls of the GPU can block.
#[derive(Debug)]
pub struct VirtualFunction {
    pub(super) client: ClientHandle,
    pub(super) queue: Option<Box<dyn ControlQueue>>,
    features: Features,
    pub(super) config: ConfigSpace,
    pub(super) control: Control,
    pub(super) display: Option<Display>,
    doorbell: Bank<DoorbellReg>,
    pub(super) vram: Window,
    pub(super) framebuffer: Window,
    pub(super) memory: SharedGuestMemory,
    pub(super) irq: Interrupts,
    /// The GPU has eventfds of the guest.
    pub(super) has_gpu_events: bool,
    /// The GPU signals all MSI vectors of the guest without the worker.
    pub(super) direct: bool,
    /// The guest's driver has used the device since the VM attached.
    pub(super) active: bool,
    pub(super) lost: bool,
    /// The vGPU does not work until it is resumed: see [`super::saved`].
    pub(super) paused: bool,
    pub(super) traps: Traps,
    /// Last scanout passed to the client.
    pub(super) last_scanout: Scanout,
    /// Whether no VM has attached since the last [`Self::detach`].
    pub(super) pristine: bool,
    /// Number of times that conditions were raised.
    pub(super) raises: u64,
    /// Answer to a mailbox request that is not written yet.
    pub(super) answer: Option<Answer>,
    pub(super) answers_later: bool,
}

impl VirtualFunction {
    /// Creates the device of a specification on top of a client.
    pub fn new(spec: &FunctionSpec, client: Box<dyn Client>) -> Result<Self, DeviceError> {
        let framebuffer = client.apertures().framebuffer.as_ref().map_or(0, |it| it.len);
        if let Some(limits) = spec.display {
            let picture = u64::from(limits.max_width) * u64::from(limits.max_height) * 4;
            if limits.max_width == 0
                || limits.max_height == 0
                || limits.max_width > u32::from(u16::MAX)
                || limits.max_height > u32::from(u16::MAX)
            {
                return Err(DeviceError::Invalid("The largest mode is not 1 to 65535 pixels"));
            }
            if picture > framebuffer {
                return Err(DeviceError::Invalid("The largest mode exceeds the framebuffer"));
            }
            if framebuffer > display::MAX_FRAMEBUFFER {
                return Err(DeviceError::Invalid("The framebuffer exceeds 256 MiB"));
            }
        }
        let features = control::features(spec, &*client);
        let bars = super::region::bars(spec, &*client)?;
        let control = Control::new(spec, &*client, features);
        let client = ClientHandle::new(client)
            .map_err(|_| DeviceError::Invalid("Its memory cannot be duplicated"))?;
        let identity =
            if spec.display.is_some() { identity::DISPLAY } else { identity::ACCELERATOR };
        let config = ConfigSpace::new(&ConfigTable {
            identity,
            intx: true,
            bars: &bars,
            capabilities: &[power_management(), msi(VECTORS), express_endpoint()],
        });
        Ok(Self {
            features,
            config,
            control,
            display: spec.display.map(|limits| Display::new(limits, framebuffer)),
            doorbell: control::doorbell_bank(),
            vram: Window::default(),
            framebuffer: Window::default(),
            memory: SharedGuestMemory::default(),
            irq: Interrupts::new(true, VECTORS),
            has_gpu_events: false,
            direct: false,
            active: false,
            lost: false,
            paused: false,
            traps: Traps::default(),
            last_scanout: Scanout::default(),
            pristine: true,
            raises: 0,
            answer: None,
            answers_later: false,
            client,
            queue: None,
        })
    }

    /// Returns the description of a region; `None` beyond [`super::REGIONS`].
    pub fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let none = RegionInfo { size: 0, readable: false, writable: false, mapping: None };
        let info = |size| RegionInfo { size, readable: true, writable: true, mapping: None };
        Some(match Region::from_index(index)? {
            Region::Config => info(CONFIG_BYTES),
            Region::Rom | Region::Vga => none,
            Region::Bar(number) => match self.bar(number) {
                None => none,
                Some(bar) => {
                    let mapping = BarKind::from_index(number).and_then(|kind| self.mapping(kind));
                    RegionInfo { mapping, ..info(bar.size) }
                }
            },
        })
    }

    fn bar(&self, number: u8) -> Option<Bar> {
        self.config.bars().iter().find(|bar| bar.index == number).copied()
    }

    /// Returns the contents of a BAR that the function has.
    fn bar_kind(&self, number: u8) -> Option<BarKind> {
        self.bar(number).and_then(|bar| BarKind::from_index(bar.index))
    }

    /// Returns the part of a BAR that a client may map.
    fn mapping(&self, kind: BarKind) -> Option<RegionMapping<'_>> {
        let apertures = self.client.apertures();
        let aperture = match kind {
            BarKind::Framebuffer => apertures.framebuffer.as_ref(),
            BarKind::Vram => apertures.vram.as_ref(),
            BarKind::Doorbell => apertures
                .doorbell
                .as_ref()
                .filter(|_| self.features.contains(Features::DOORBELL_MAPPED)),
            BarKind::Display | BarKind::Control => None,
        };
        aperture.map(RegionMapping::from)
    }

    /// Returns the register of a region whose writes an eventfd can deliver: `WAKE`, or a trapped
    /// doorbell. Both wake all channels, so the written token is not needed.
    pub fn region_event(&self, index: u32) -> Option<RegionEvent<'_>> {
        let Region::Bar(number) = Region::from_index(index)? else { return None };
        let offset = match self.bar_kind(number)? {
            // The queue has to know of each wake-up.
            BarKind::Control if self.queue.is_none() => reg::WAKE,
            BarKind::Doorbell if !self.features.contains(Features::DOORBELL_MAPPED) => {
                doorbell::TOKEN
            }
            _ => return None,
        };
        Some(RegionEvent { offset, len: 4, fd: self.client.wake_event()? })
    }

    fn check_access(&self, index: u32, offset: u64, len: usize) -> Result<Region, AccessError> {
        let region = Region::from_index(index);
        let size = self.region(index).map_or(0, |info| info.size);
        let Some(region) = region.filter(|_| size > 0) else {
            return Err(AccessError::NoRegion(index));
        };
        match offset.checked_add(len as u64) {
            Some(end) if end <= size => Ok(region),
            _ => Err(AccessError::OutOfRange { region: index, offset, len }),
        }
    }

    /// Reads `data.len()` bytes of a region. Accesses can be unaligned and of any length.
    pub fn region_read(
        &mut self,
        index: u32,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        let region = self.check_access(index, offset, data.len())?;
        let kind = match region {
            Region::Bar(number) => self.bar_kind(number),
            Region::Config | Region::Rom | Region::Vga => None,
        };
        match kind {
            None => {
                self.traps.config += 1;
                let intx = !self.control.interrupting().is_empty();
                self.config.read(offset, data, intx);
            }
            Some(BarKind::Control) => {
                self.traps.control += 1;
                // After an MSI from the GPU itself, the interrupt status must be up to date.
                if Control::touches_interrupt_status(offset, data.len()) {
                    self.collect(Delivery::Line);
                }
                let queue = self.queue_status();
                self.control.read(offset, data, self.lost, queue);
            }
            Some(BarKind::Display) => {
                self.traps.display += 1;
                if let Some(display) = &mut self.display {
                    display.read(offset, data);
                }
            }
            Some(BarKind::Doorbell) => self.doorbell.read(offset, data, |_, value| value),
            Some(kind @ (BarKind::Framebuffer | BarKind::Vram)) => {
                self.traps.memory += 1;
                if let Some((window, aperture)) = self.window(kind) {
                    window.read(aperture, offset, data);
                }
            }
        }
        Ok(())
    }

    /// Writes `data` to a region. Invalid values are not errors of the access.
    pub fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let region = self.check_access(index, offset, data.len())?;
        let kind = match region {
            Region::Bar(number) => self.bar_kind(number),
            Region::Config | Region::Rom | Region::Vga => None,
        };
        match kind {
            None => self.write_config(offset, data),
            Some(BarKind::Control) => self.write_control(offset, data),
            Some(BarKind::Display) => self.write_display(offset, data),
            Some(BarKind::Doorbell) => {
                let mut token = None;
                self.doorbell.write(offset, data, |_, id, write| match id {
                    DoorbellReg::Token => token = Some(Token(write.raw)),
                });
                if let Some(token) = token {
                    self.wake(token);
                }
            }
            Some(kind @ (BarKind::Framebuffer | BarKind::Vram)) => {
                self.traps.memory += 1;
                if let Some((window, aperture)) = self.window(kind) {
                    window.write(aperture, offset, data);
                }
            }
        }
        Ok(())
    }

    fn window(&mut self, kind: BarKind) -> Option<(&mut Window, &Aperture)> {
        let apertures = self.client.apertures();
        match kind {
            BarKind::Vram => Some((&mut self.vram, apertures.vram.as_ref()?)),
            BarKind::Framebuffer => Some((&mut self.framebuffer, apertures.framebuffer.as_ref()?)),
            BarKind::Doorbell | BarKind::Display | BarKind::Control => None,
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.traps.config += 1;
        let effect = self.config.write(offset, data);
        if effect.reset {
            self.reset();
        } else if effect.intx_changed {
            self.update_line();
        }
    }

    fn write_display(&mut self, offset: u64, data: &[u8]) {
        self.traps.display += 1;
        let Some(display) = &mut self.display else { return };
        let effect = display.write(offset, data);
        self.active |= effect.enabled;
        if let Some(len) = effect.clear
            && let Some((window, aperture)) = self.window(BarKind::Framebuffer)
        {
            window.clear(aperture, len);
        }
        self.update_scanout();
    }

    /// Passes a changed scanout to the client.
    pub(super) fn update_scanout(&mut self) {
        let scanout = self.scanout();
        if scanout != self.last_scanout {
            self.last_scanout = scanout;
            let result = self.client.lock().set_scanout(&scanout);
            self.check_lost(result);
        }
    }

    fn write_control(&mut self, offset: u64, data: &[u8]) {
        self.traps.control += 1;
        let effect = self.control.write(offset, data);
        if effect.mailbox {
            self.serve_mailbox();
        }
        if let Some(token) = effect.wake {
            self.wake(token);
        }
        if let Some(enable) = effect.queue {
            self.write_queue_control(enable);
        }
        if effect.notify {
            self.notify_queue();
        }
        if effect.interrupts {
            self.connect_msi_to_queue();
            if effect.newly_enabled != 0 {
                self.connect_msi_to_gpu();
                let pending = Pending::from_bits_truncate(effect.newly_enabled);
                self.deliver(pending & self.control.interrupting(), Delivery::All);
            }
            if !self.control.enabled().contains(Pending::NONSTALL) {
                self.connect_msi_to_gpu();
            }
            self.update_line();
        }
    }

    fn serve_mailbox(&mut self) {
        self.traps.mailbox += 1;
        self.active = true;
        let queue_runs = self.queue_runs();
        let outcome = self.execute_mailbox(queue_runs);
        self.control.set_mailbox_status(outcome.status);
        self.answer = outcome.answer;
        if !self.answers_later && !self.write_answer() {
            self.control.set_mailbox_status(Status::BadMailbox);
        }
        if outcome.lost {
            self.lose();
        }
    }

    /// Executes the request in the mailbox, or refuses it without the client.
    fn execute_mailbox(&mut self, queue_runs: bool) -> mailbox::Outcome {
        let address = self.control.mailbox();
        if queue_runs {
            return mailbox::refuse(&mut self.memory.lock(), address, self.lost);
        }
        // The client first, as in the queue's thread.
        let mut client = self.client.lock();
        let mut environment = Environment {
            client: &mut **client,
            memory: &mut self.memory.lock(),
            features: self.features,
        };
        mailbox::serve(&mut environment, address, self.lost)
    }

    fn wake(&mut self, token: Token) {
        self.traps.doorbell += 1;
        self.control.count_doorbell();
        // A request of the queue may take long. The queue's thread wakes the engine after it.
        let woken = self.client.try_lock().map(|mut client| client.wake(token));
        if let Some(queue) = &mut self.queue {
            queue.woken(woken.is_none());
        }
        self.check_lost(woken.unwrap_or(Ok(())));
    }

    /// Handles the result of a GPU call that is not reported to the guest.
    pub(super) fn check_lost(&mut self, result: Result<(), GpuError>) {
        match result {
            Ok(()) => {}
            Err(GpuError::Lost(_)) => self.lose(),
            Err(error) => log::debug!("The GPU refused a call: {error}"),
        }
    }

    pub(super) fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            log::error!("The GPU is lost: every request gets DeviceLost until a restart");
            self.raise(Pending::DEVICE_LOST, Delivery::All);
        }
    }

    /// Starts the backend's threads: see [`Client::start`].
    pub fn start(&mut self) -> Result<(), GpuError> {
        self.client.lock().start()
    }

    /// Accepts the connection of a new manager, for GPUs that are controlled through the worker.
    pub fn attach_manager(&mut self, fd: OwnedFd) -> Result<(), GpuError> {
        self.client.lock().attach_manager(fd)
    }

    /// Resets registers, channels and GPU mappings, for DEVICE_RESET and a function-level reset.
    /// Guest memory and the client's eventfds stay.
    pub fn reset(&mut self) {
        self.reset_queue();
        let reset = self.client.lock().reset();
        self.paused = false;
        self.config.reset();
        self.control.reset();
        if let Some(display) = &mut self.display {
            display.reset();
        }
        self.update_scanout();
        // Drop conditions from before the reset, except for the loss of the GPU.
        let lost = self.client.lock().take_pending().contains(Pending::DEVICE_LOST);
        self.connect_msi_to_gpu();
        self.update_line();
        self.check_lost(reset);
        if lost {
            self.lose();
        }
    }

    /// Returns the client of the GPU, for work that does not come through the device.
    pub fn client(&mut self) -> MutexGuard<'_, Box<dyn Client>> {
        self.client.lock()
    }

    /// Returns the picture on the screen.
    pub fn scanout(&self) -> Scanout {
        self.display.as_ref().map(Display::scanout).unwrap_or_default()
    }

    /// Returns the mappable video memory that [`Scanout::offset`] refers to: the aperture of the
    /// partition, or else that of the framebuffer, which is the start of the partition.
    pub fn vram(&self) -> Option<RegionMapping<'_>> {
        let apertures = self.client.apertures();
        apertures.vram.as_ref().or(apertures.framebuffer.as_ref()).map(RegionMapping::from)
    }

    /// Returns the counters of trapped accesses.
    pub fn traps(&self) -> Traps {
        self.traps
    }

    /// Returns warnings about the attached VM for the operator, one line each.
    pub fn warnings(&self) -> Vec<String> {
        let bars = self.config.bars().iter();
        let own: Vec<_> =
            bars.filter_map(|bar| Some((self.config.bar_address(bar.index)?, bar.size))).collect();
        let limits = ImportLimits {
            gpu: self.client.gpu().max_import_bytes,
            vgpu: self.client.spec().max_import_bytes,
        };
        let mut lines = self.memory.lock().advice(&own, self.active, limits);
        if self.paused {
            lines.push("It is paused since a save or restore: `vgpuctl resume`".to_owned());
        }
        if self.is_checkpoint_wanted() {
            lines.push("Its CUDA programs are checkpointed: `vgpuctl resume`".to_owned());
        }
        if self.lost {
            lines.push("The GPU is lost: stop the vGPU and start it again".to_owned());
        }
        lines
    }

    /// Returns false once the GPU is lost.
    pub fn gpu_ok(&self) -> bool {
        !self.lost
    }

    /// Returns the usage counters.
    pub fn usage(&mut self) -> Result<Usage, GpuError> {
        self.client.lock().usage()
    }

    /// Returns the function's register tables as Markdown with their names, for `docs/`.
    pub fn register_tables(&self) -> Vec<(&'static str, String)> {
        let mut tables = vec![
            ("control", self.control.bank().markdown()),
            ("doorbell", self.doorbell.markdown()),
            ("config", self.config.bank().markdown()),
        ];
        tables.extend(self.display.iter().map(|it| ("display", it.bank().markdown())));
        tables
    }
}
