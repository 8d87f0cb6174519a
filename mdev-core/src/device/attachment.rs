//! Arrival and departure of a VM, and what is left for the next one.

use super::VirtualFunction;
use super::window::Window;

impl VirtualFunction {
    /// Notes that a VM attaches to the device.
    pub fn attach(&mut self) {
        if !self.pristine {
            self.detach();
        }
        self.pristine = false;
    }

    /// Returns the device to its initial state after its VM is gone. The next VM gets other video
    /// memory, or the same scrubbed: [`Self::region`] returns new mappings.
    pub fn detach(&mut self) {
        self.release_client();
        self.vram = Window::default();
        self.framebuffer = Window::default();
        let renewed = self.client.lock().renew();
        if let Err(error) = self.client.refresh() {
            log::error!("The next VM's memory cannot be duplicated: {error}");
        }
        if !matches!(renewed, Ok(true)) {
            self.scrub();
        }
        if let Err(error) = &renewed {
            log::warn!("The next VM gets no new video memory: {error}");
        }
        // After a refusal, the next VM tries again.
        self.pristine = renewed.is_ok();
        self.check_lost(renewed.map(drop));
        self.active = false;
    }

    /// Releases video memory to the host if its file can have holes; the next VM reads zeros.
    pub(super) fn scrub(&mut self) {
        let apertures = self.client.apertures();
        let vram = apertures.vram.as_ref().or(apertures.framebuffer.as_ref());
        let Some(vram) = vram else {
            if self.stages_memory()
                && let Err(error) = self.client.lock().scrub()
            {
                log::warn!("Video memory was not cleared: {error}");
            }
            return;
        };
        let done = vram.punch_hole(0, vram.len).is_ok();
        // The backend scrubs a file without holes, such as real video memory.
        if !done && let Err(error) = self.client.lock().scrub() {
            log::debug!("Video memory was not scrubbed: {error}");
        }
    }
}
