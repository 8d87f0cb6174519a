//! Generations of GPUs: the classes of channels and engines, which the driver lists for a GPU.

use mdev_core::abi::{compute, copy, host};

use crate::numbers::class;

pub use crate::controls::CLASS_LIST;

/// Length of the parameters of [`CLASS_LIST`] in series 580, in bytes: the number of classes, and
/// room for 200.
pub const CLASS_LIST_BYTES: usize = 804;

/// Classes of doorbell pages, `TURING_USERMODE_A` to `BLACKWELL_USERMODE_A`. A GPU also has those
/// of generations before it, and libcuda uses them.
pub const DOORBELL_PAGES: [u32; 4] = [0xc461, 0xc561, class::USERMODE, 0xc761];

/// Generation of GPUs.
#[derive(Debug, PartialEq, Eq)]
pub struct Generation {
    /// Name.
    pub name: &'static str,
    /// Class of channels (`*_CHANNEL_GPFIFO_*`).
    pub channel: u32,
    /// Class of compute objects (`*_COMPUTE_*`).
    pub compute: u32,
    /// Class of copy objects (`*_DMA_COPY_*`).
    pub copy: u32,
    /// Class of the doorbell page for the worker that rings for a guest.
    pub doorbell_page: u32,
}

/// The generation that is tested, and whose kernels `vgpu-guest` has.
pub static HOPPER: Generation = Generation {
    name: "Hopper",
    channel: host::CLASS,
    compute: compute::CLASS,
    copy: copy::CLASS,
    doorbell_page: class::USERMODE,
};

/// All known generations, the newest first: a GPU may list classes of older ones.
static ALL: [&Generation; 8] = [
    // libcuda uses the first class of channels on both.
    &Generation::new("Blackwell (GB20x)", [0xc96f, 0xcec0, 0xcab5, 0xc761]),
    &Generation::new("Blackwell (GB20x)", [0xca6f, 0xcec0, 0xcab5, 0xc761]),
    &Generation::new("Blackwell", [0xc96f, 0xcdc0, 0xc9b5, 0xc761]),
    &HOPPER,
    &Generation::new("Ada", [0xc56f, 0xc9c0, 0xc7b5, 0xc561]),
    &Generation::new("Ampere (GA10x)", [0xc56f, 0xc7c0, 0xc7b5, 0xc561]),
    &Generation::new("Ampere (GA100)", [0xc56f, 0xc6c0, 0xc6b5, 0xc561]),
    &Generation::new("Turing", [0xc46f, 0xc5c0, 0xc5b5, 0xc461]),
];

impl Generation {
    /// Creates a generation with the classes of channels, compute, copies and the doorbell page.
    const fn new(name: &'static str, classes: [u32; 4]) -> Self {
        let [channel, compute, copy, doorbell_page] = classes;
        Self { name, channel, compute, copy, doorbell_page }
    }

    /// Returns the generation of a GPU by the parameters that [`CLASS_LIST`] returned.
    pub fn of_list(params: &[u8]) -> Option<&'static Self> {
        let mut words = params.chunks_exact(4).filter_map(|word| word.first_chunk().copied());
        let count = words.next().map(u32::from_le_bytes)?;
        let classes: Vec<_> = words.map(u32::from_le_bytes).take(count as usize).collect();
        ALL.into_iter().find(|known| {
            [known.channel, known.compute, known.copy].iter().all(|class| classes.contains(class))
        })
    }

    /// Returns whether Tessera was tested on this generation.
    pub fn is_tested(&self) -> bool {
        *self == HOPPER
    }

    /// Returns the class of Hopper that does what `class` does on this generation, for a driver
    /// without a GPU. `None` for a class that only other generations have.
    #[cfg(feature = "test-util")]
    pub fn class_of_hopper(&self, class: u32) -> Option<u32> {
        let classes = |of: &Self| [of.channel, of.compute, of.copy, of.doorbell_page];
        let (own, hopper) = (classes(self), classes(&HOPPER));
        if let Some(place) = own.iter().position(|own| *own == class) {
            return Some(hopper[place]);
        }
        let other = ALL.iter().any(|other| classes(other).contains(&class));
        (!other).then_some(class)
    }

    /// Returns the parameters of [`CLASS_LIST`] for a GPU with these classes only.
    #[cfg(any(test, feature = "test-util"))]
    pub fn list(&self) -> Vec<u8> {
        let classes = [self.channel, self.compute, self.copy, self.doorbell_page];
        let mut words = vec![classes.len() as u32];
        words.extend(classes);
        words.resize(CLASS_LIST_BYTES / 4, 0);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

/// Returns all known generations, for tests.
#[cfg(any(test, feature = "test-util"))]
pub fn all() -> impl Iterator<Item = &'static Generation> {
    ALL.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Recorded;

    #[test]
    fn a_gpu_is_of_the_newest_generation_whose_classes_it_lists() {
        for generation in all() {
            assert_eq!(Generation::of_list(&generation.list()), Some(generation));
        }
        let mut list = HOPPER.list();
        let older = ALL[4].list();
        list[..4].copy_from_slice(&8_u32.to_le_bytes());
        list.copy_within(4..20, 20);
        list[4..20].copy_from_slice(&older[4..20]);
        assert_eq!(Generation::of_list(&list), Some(&HOPPER), "it lists an older one first");
        list[..4].copy_from_slice(&4_u32.to_le_bytes());
        assert_eq!(Generation::of_list(&list), Some(ALL[4]), "the rest is not in the list");
    }

    #[test]
    fn the_recorded_list_of_an_h100_is_hoppers() {
        let mut list = [0; CLASS_LIST_BYTES];
        assert_eq!(Recorded::hopper().unwrap().query(CLASS_LIST, &mut list), Some(0));
        assert_eq!(Generation::of_list(&list), Some(&HOPPER));
    }

    #[test]
    fn a_list_of_no_known_generation_is_none() {
        for list in [&[][..], &[9, 0], &[255; CLASS_LIST_BYTES], &[0; CLASS_LIST_BYTES]] {
            assert_eq!(Generation::of_list(list), None);
        }
    }
}
