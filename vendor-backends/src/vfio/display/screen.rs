//! The vGPU that the screen shows, as a state machine without a device, threads or a clock.

use std::time::{Duration, Instant};

use mdev_core::device::Scanout;
use mdev_core::gpu::ScreenStatus;
use mdev_core::ids::VgpuId;

use super::memory::Range;
use super::mode::{Mode, ModeError};

/// One vGPU's display head.
#[derive(Clone, Debug)]
struct Head {
    vgpu: VgpuId,
    memory: Range,
    /// Mode that the guest has set, if the screen can show it.
    mode: Option<Mode>,
}

/// Display heads of all vGPUs, in order of arrival, and the focused one.
#[derive(Debug, Default)]
pub struct Screen {
    heads: Vec<Head>,
    focus: Option<VgpuId>,
    rotation: Option<Rotation>,
}

/// Rotation of the screen among vGPUs.
#[derive(Clone, Copy, Debug)]
struct Rotation {
    every: Duration,
    next: Instant,
}

impl Screen {
    /// Adds a vGPU. It gets the focus if no other vGPU has it.
    pub fn add(&mut self, vgpu: VgpuId, memory: Range) {
        self.remove(vgpu);
        self.heads.push(Head { vgpu, memory, mode: None });
        self.focus.get_or_insert(vgpu);
    }

    /// Removes a vGPU. Its focus moves to the next vGPU, preferably one with a picture.
    pub fn remove(&mut self, vgpu: VgpuId) {
        let Some(index) = self.index_of(vgpu) else { return };
        self.heads.remove(index);
        if self.focus == Some(vgpu) {
            // The next head is now at the same index.
            self.focus = self.with_picture(index).or_else(|| self.after(index).next());
        }
    }

    /// Sets a vGPU's scanout. A scanout that the screen cannot show, or that exceeds the vGPU's
    /// memory, is refused and makes the vGPU's head dark.
    pub fn set(&mut self, vgpu: VgpuId, scanout: &Scanout) -> Result<(), ModeError> {
        let Some(index) = self.index_of(vgpu) else { return Ok(()) };
        let head = &mut self.heads[index];
        let mode = Mode::of(scanout, head.memory);
        head.mode = mode.unwrap_or_default();
        mode.map(drop)
    }

    /// Gives a vGPU the focus and stops the rotation. Returns false for an unknown vGPU.
    pub fn focus(&mut self, vgpu: VgpuId) -> bool {
        let known = self.index_of(vgpu).is_some();
        if known {
            self.focus = Some(vgpu);
            self.rotation = None;
        }
        known
    }

    /// Starts or stops the rotation.
    pub fn rotate(&mut self, every: Option<Duration>, now: Instant) {
        self.rotation = every.map(|every| Rotation { every, next: now + every });
    }

    /// Returns the time of the next rotation step.
    pub fn deadline(&self) -> Option<Instant> {
        self.rotation.map(|rotation| rotation.next)
    }

    /// Moves the focus to the next vGPU with a picture, if the deadline has passed.
    pub fn advance(&mut self, now: Instant) {
        let Some(rotation) = self.rotation.as_mut().filter(|rotation| rotation.next <= now) else {
            return;
        };
        rotation.next = now + rotation.every;
        let here = self.focus.and_then(|vgpu| self.index_of(vgpu));
        if let Some(next) = self.with_picture(here.map_or(0, |index| index + 1)) {
            self.focus = Some(next);
        }
    }

    /// Returns the mode to show, or `None` if the screen is dark.
    pub fn picture(&self) -> Option<Mode> {
        self.heads.iter().find(|head| Some(head.vgpu) == self.focus)?.mode
    }

    /// Returns the focus and the rotation.
    pub fn status(&self) -> ScreenStatus {
        ScreenStatus { focus: self.focus, rotation: self.rotation.map(|rotation| rotation.every) }
    }

    fn index_of(&self, vgpu: VgpuId) -> Option<usize> {
        self.heads.iter().position(|head| head.vgpu == vgpu)
    }

    /// Returns all vGPUs in order, starting at an index and wrapping around.
    fn after(&self, index: usize) -> impl Iterator<Item = VgpuId> {
        let count = self.heads.len();
        (0..count).map(move |step| self.heads[(index + step) % count].vgpu)
    }

    /// Returns the first vGPU with a picture, in the order of [`Self::after`].
    fn with_picture(&self, index: usize) -> Option<VgpuId> {
        let count = self.heads.len();
        let mut heads = (0..count).map(|step| &self.heads[(index + step) % count]);
        heads.find(|head| head.mode.is_some()).map(|head| head.vgpu)
    }
}

#[cfg(test)]
mod tests {
    use mdev_core::units::MIB;
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn id(n: u8) -> VgpuId {
        VgpuId(Uuid::from_u128(n.into()))
    }

    fn memory(n: u8) -> Range {
        Range { offset: u64::from(n) * 4 * MIB, len: 4 * MIB }
    }

    fn on(width: u32) -> Scanout {
        Scanout {
            enabled: true,
            width,
            height: 480,
            stride: width * 4,
            bits_per_pixel: 32,
            ..Scanout::default()
        }
    }

    fn with(count: u8) -> Screen {
        let mut screen = Screen::default();
        for n in 0..count {
            screen.add(id(n), memory(n));
            screen.set(id(n), &on(640)).unwrap();
        }
        screen
    }

    #[test]
    fn the_first_vgpu_is_shown_until_another_gets_the_focus() {
        let mut screen = Screen::default();
        assert_eq!((screen.status().focus, screen.picture()), (None, None));
        screen.add(id(0), memory(0));
        assert_eq!((screen.status().focus, screen.picture()), (Some(id(0)), None), "no mode yet");
        screen.add(id(1), memory(1));
        screen.set(id(1), &on(800)).unwrap();
        assert_eq!(screen.picture(), None, "the other's mode is not shown");
        screen.set(id(0), &on(640)).unwrap();
        assert_eq!(screen.picture(), Some(Mode::of(&on(640), memory(0)).unwrap().unwrap()));
        assert!(screen.focus(id(1)) && !screen.focus(id(9)));
        assert_eq!(screen.picture(), Some(Mode::of(&on(800), memory(1)).unwrap().unwrap()));
        // The screen follows the focused guest only.
        screen.set(id(0), &on(320)).unwrap();
        screen.set(id(1), &on(720)).unwrap();
        assert_eq!(screen.picture(), Some(Mode::of(&on(720), memory(1)).unwrap().unwrap()));
        screen.set(id(1), &Scanout::default()).unwrap();
        assert_eq!((screen.status().focus, screen.picture()), (Some(id(1)), None), "dark");
    }

    #[test]
    fn a_removed_vgpu_is_followed_by_the_next_with_a_picture() {
        let mut screen = with(4);
        screen.focus(id(1));
        screen.set(id(2), &Scanout::default()).unwrap();
        screen.remove(id(1));
        assert_eq!(screen.status().focus, Some(id(3)));
        screen.remove(id(3));
        assert_eq!(screen.status().focus, Some(id(0)), "wraps around");
        screen.remove(id(0));
        assert_eq!((screen.status().focus, screen.picture()), (Some(id(2)), None));
        screen.remove(id(2));
        screen.remove(id(2));
        assert_eq!((screen.status().focus, screen.picture()), (None, None));
    }

    #[test]
    fn rotation_skips_dark_heads_and_ends_on_focus() {
        let mut screen = with(3);
        screen.set(id(1), &Scanout::default()).unwrap();
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        screen.rotate(Some(second), start);
        let mut seen = Vec::new();
        for n in 1..=4 {
            screen.advance(start + (n - 1) * second + Duration::from_millis(999));
            seen.push(screen.status().focus.unwrap());
            screen.advance(start + n * second);
            assert_eq!(screen.deadline(), Some(start + (n + 1) * second));
        }
        assert_eq!(seen, [id(0), id(2), id(0), id(2)]);
        screen.focus(id(1));
        assert_eq!((screen.status().rotation, screen.deadline()), (None, None));
        screen.advance(start + 100 * second);
        assert_eq!(screen.status().focus, Some(id(1)));
        // Without another vGPU to show, the focus stays.
        let mut screen = with(1);
        screen.rotate(Some(second), start);
        screen.advance(start + second);
        assert_eq!(screen.status().focus, Some(id(0)));
        screen.remove(id(0));
        screen.advance(start + 2 * second);
        assert_eq!(screen.status().focus, None);
    }

    proptest! {
        /// A vGPU has the focus whenever there is one, and the screen shows only memory of the
        /// focused vGPU.
        #[test]
        fn only_memory_of_the_focused_vgpu_is_shown(
            steps in prop::collection::vec((0..6_u8, 0..5_u8, any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()), 0..60),
        ) {
            let mut screen = Screen::default();
            let mut present = std::collections::BTreeSet::new();
            let mut now = Instant::now();
            for (what, n, width, height, stride, offset) in steps {
                let small = |value: u32| value % 2048;
                match what {
                    0 => { screen.add(id(n), memory(n)); present.insert(n); }
                    1 => { screen.remove(id(n)); present.remove(&n); }
                    2 => { screen.focus(id(n)); }
                    3 => {
                        now += Duration::from_secs(u64::from(n));
                        screen.advance(now);
                    }
                    4 => screen.rotate((n > 0).then(|| Duration::from_secs(n.into())), now),
                    _ => {
                        let scanout = Scanout {
                            enabled: true,
                            width: small(width),
                            height: small(height),
                            stride: if stride % 3 == 0 { stride } else { small(width) * 4 },
                            bits_per_pixel: 32,
                            offset: if offset % 2 == 0 { offset % (4 * MIB) } else { offset },
                            big_endian: false,
                        };
                        let _ = screen.set(id(n), &scanout);
                    }
                }
                let focus = screen.status().focus;
                prop_assert_eq!(focus.is_some(), !present.is_empty());
                if let Some(mode) = screen.picture() {
                    let focused = present.iter().find(|n| Some(id(**n)) == focus).unwrap();
                    let own = memory(*focused);
                    let shown = mode.memory();
                    prop_assert!(own.offset <= shown.offset);
                    prop_assert!(shown.offset + shown.len <= own.offset + own.len);
                }
            }
        }
    }
}
