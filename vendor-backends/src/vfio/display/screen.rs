//! Who is on the screen: events in, a picture out. No device, thread or clock.

use std::time::{Duration, Instant};

use mdev_core::device::Scanout;
use mdev_core::gpu::PhysicalScreen;
use mdev_core::ids::VgpuId;

use super::memory::Range;
use super::mode::{Mode, ModeError};

/// One vGPU's head.
#[derive(Clone, Debug)]
struct Head {
    vgpu: VgpuId,
    memory: Range,
    /// What its guest has set, if it can be shown.
    mode: Option<Mode>,
}

/// The heads of all vGPUs, in the order in which they came, and which one is seen.
#[derive(Debug, Default)]
pub struct Screen {
    heads: Vec<Head>,
    focus: Option<VgpuId>,
    turns: Option<Turns>,
}

/// vGPUs take turns.
#[derive(Clone, Copy, Debug)]
struct Turns {
    every: Duration,
    next: Instant,
}

impl Screen {
    /// A vGPU comes. It is seen if nobody else is.
    pub fn add(&mut self, vgpu: VgpuId, memory: Range) {
        self.remove(vgpu);
        self.heads.push(Head { vgpu, memory, mode: None });
        self.focus.get_or_insert(vgpu);
    }

    /// A vGPU goes. If it was seen, the one after it is, and of those one with a picture if there is one.
    pub fn remove(&mut self, vgpu: VgpuId) {
        let Some(place) = self.place(vgpu) else { return };
        self.heads.remove(place);
        if self.focus == Some(vgpu) {
            // The next one has moved to its place.
            self.focus = self.with_picture(place).or_else(|| self.after(place).next());
        }
    }

    /// What a vGPU's guest shows has changed. What the screen could not show, or what is not wholly in the vGPU's own
    /// memory, is refused, and the vGPU is dark.
    pub fn set(&mut self, vgpu: VgpuId, scanout: &Scanout) -> Result<(), ModeError> {
        let Some(place) = self.place(vgpu) else { return Ok(()) };
        let head = &mut self.heads[place];
        let mode = Mode::of(scanout, head.memory);
        head.mode = mode.unwrap_or_default();
        mode.map(drop)
    }

    /// Puts a vGPU on the screen, where it stays: turns end. False where there is no such vGPU.
    pub fn focus(&mut self, vgpu: VgpuId) -> bool {
        let known = self.place(vgpu).is_some();
        if known {
            self.focus = Some(vgpu);
            self.turns = None;
        }
        known
    }

    /// Shows each in turn, or ends that.
    pub fn rotate(&mut self, every: Option<Duration>, now: Instant) {
        self.turns = every.map(|every| Turns { every, next: now + every });
    }

    /// When the next one's turn is.
    pub fn deadline(&self) -> Option<Instant> {
        self.turns.map(|turns| turns.next)
    }

    /// It is so late: whose turn it is is seen, if somebody else has a picture.
    pub fn turn(&mut self, now: Instant) {
        let Some(turns) = self.turns.as_mut().filter(|turns| turns.next <= now) else { return };
        turns.next = now + turns.every;
        let here = self.focus.and_then(|vgpu| self.place(vgpu));
        if let Some(next) = self.with_picture(here.map_or(0, |place| place + 1)) {
            self.focus = Some(next);
        }
    }

    /// What the screen is to show; `None` while it is dark.
    pub fn picture(&self) -> Option<Mode> {
        self.heads.iter().find(|head| Some(head.vgpu) == self.focus)?.mode
    }

    /// How it is.
    pub fn status(&self) -> PhysicalScreen {
        PhysicalScreen { focus: self.focus, rotation: self.turns.map(|turns| turns.every) }
    }

    fn place(&self, vgpu: VgpuId) -> Option<usize> {
        self.heads.iter().position(|head| head.vgpu == vgpu)
    }

    /// All vGPUs, from this place on and round.
    fn after(&self, place: usize) -> impl Iterator<Item = VgpuId> {
        let count = self.heads.len();
        (0..count).map(move |step| self.heads[(place + step) % count].vgpu)
    }

    /// The first of these with a picture.
    fn with_picture(&self, place: usize) -> Option<VgpuId> {
        let count = self.heads.len();
        let mut heads = (0..count).map(|step| &self.heads[(place + step) % count]);
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
    fn the_first_is_seen_until_another_is_asked_for() {
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
        // It follows its guest, and its guest alone.
        screen.set(id(0), &on(320)).unwrap();
        screen.set(id(1), &on(720)).unwrap();
        assert_eq!(screen.picture(), Some(Mode::of(&on(720), memory(1)).unwrap().unwrap()));
        screen.set(id(1), &Scanout::default()).unwrap();
        assert_eq!((screen.status().focus, screen.picture()), (Some(id(1)), None), "dark");
    }

    #[test]
    fn who_goes_is_followed_by_the_next_that_has_a_picture() {
        let mut screen = with(4);
        screen.focus(id(1));
        screen.set(id(2), &Scanout::default()).unwrap();
        screen.remove(id(1));
        assert_eq!(screen.status().focus, Some(id(3)));
        screen.remove(id(3));
        assert_eq!(screen.status().focus, Some(id(0)), "round");
        screen.remove(id(0));
        assert_eq!((screen.status().focus, screen.picture()), (Some(id(2)), None));
        screen.remove(id(2));
        screen.remove(id(2));
        assert_eq!((screen.status().focus, screen.picture()), (None, None));
    }

    #[test]
    fn turns_pass_over_the_dark_and_end_when_one_is_asked_for() {
        let mut screen = with(3);
        screen.set(id(1), &Scanout::default()).unwrap();
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        screen.rotate(Some(second), start);
        let mut seen = Vec::new();
        for n in 1..=4 {
            screen.turn(start + (n - 1) * second + Duration::from_millis(999));
            seen.push(screen.status().focus.unwrap());
            screen.turn(start + n * second);
            assert_eq!(screen.deadline(), Some(start + (n + 1) * second));
        }
        assert_eq!(seen, [id(0), id(2), id(0), id(2)]);
        screen.focus(id(1));
        assert_eq!((screen.status().rotation, screen.deadline()), (None, None));
        screen.turn(start + 100 * second);
        assert_eq!(screen.status().focus, Some(id(1)));
        // With nobody else to show, who is there stays.
        let mut screen = with(1);
        screen.rotate(Some(second), start);
        screen.turn(start + second);
        assert_eq!(screen.status().focus, Some(id(0)));
        screen.remove(id(0));
        screen.turn(start + 2 * second);
        assert_eq!(screen.status().focus, None);
    }

    proptest! {
        /// Whatever happens: somebody is seen while there is anybody, and nothing is shown but that one's own memory.
        #[test]
        fn what_is_shown_is_in_the_memory_of_who_is_seen(
            steps in prop::collection::vec((0..6_u8, 0..5_u8, any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()), 0..60),
        ) {
            let mut screen = Screen::default();
            let mut there = std::collections::BTreeSet::new();
            let mut now = Instant::now();
            for (what, n, width, height, stride, offset) in steps {
                let small = |value: u32| value % 2048;
                match what {
                    0 => { screen.add(id(n), memory(n)); there.insert(n); }
                    1 => { screen.remove(id(n)); there.remove(&n); }
                    2 => { screen.focus(id(n)); }
                    3 => {
                        now += Duration::from_secs(u64::from(n));
                        screen.turn(now);
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
                prop_assert_eq!(focus.is_some(), !there.is_empty());
                if let Some(mode) = screen.picture() {
                    let owner = there.iter().find(|n| Some(id(**n)) == focus).unwrap();
                    let own = memory(*owner);
                    let shown = mode.memory();
                    prop_assert!(own.offset <= shown.offset);
                    prop_assert!(shown.offset + shown.len <= own.offset + own.len);
                }
            }
        }
    }
}
