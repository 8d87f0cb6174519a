//! Arenas, whatever programs allocate and free.

use std::collections::BTreeSet;

use nix::sys::uio::pread;
use proptest::prelude::*;

use super::*;

const ROOM: u64 = 64 * MIB;

fn owner(file: u64) -> Owner {
    Owner { file: FileId(file), process: 7, may_add: true }
}

/// An object in an arena.
#[derive(Clone, Copy, Debug)]
struct Held {
    owner: u64,
    place: ArenaPlace,
    len: u64,
}

impl Held {
    fn ends(&self) -> [u64; 2] {
        [self.place.start, self.place.start + self.len - PAGE_SIZE]
    }
}

fn read_page(files: &Files, id: MemoryFileId, at: u64) -> Vec<u8> {
    let mut page = vec![1; PAGE_SIZE as usize];
    assert_eq!(pread(files.file(id).unwrap(), &mut page, at.cast_signed()), Ok(page.len()));
    page
}

/// Checks that objects do not overlap, and that a file has those of one owner.
fn check(files: &Files, held: &[Held]) -> Result<(), TestCaseError> {
    let mut by_place: Vec<_> = held.iter().collect();
    by_place.sort_by_key(|one| (one.place.file, one.place.start));
    for pair in by_place.windows(2) {
        let [first, second] = [pair[0], pair[1]];
        if first.place.file == second.place.file {
            prop_assert!(first.place.start + first.len <= second.place.start);
            prop_assert_eq!(first.owner, second.owner);
            prop_assert_eq!(files.sole_owner(first.place.file), Some(FileId(first.owner)));
        }
    }
    let used: BTreeSet<_> = held.iter().map(|one| one.place.file).collect();
    prop_assert_eq!(used.len(), files.processes().count(), "an empty arena is gone");
    let lens = files.all().into_iter().filter_map(|(_, state)| Some(state?.arena?.len));
    prop_assert_eq!(lens.sum::<u64>(), files.arena_bytes());
    prop_assert!(files.arena_bytes() <= ROOM);
    Ok(())
}

/// Returns the files as the next worker adopts them.
fn adopted(files: &Files, held: &[Held]) -> Files {
    let states = files.all().into_iter().map(|(id, state)| (id, state.unwrap())).collect();
    let mut take = |id| Some(OwnedFd::from(files.file(id)?.try_clone().unwrap()));
    let mut next = Files::default();
    next.adopt(files.last(), states, &mut take).unwrap();
    assert_eq!(next.check_adopted().is_ok(), held.is_empty());
    assert!(held.iter().all(|one| next.adopt_place(one.place, one.len)));
    next.check_adopted().unwrap();
    // No place is another one's.
    assert!(!held.iter().any(|one| next.adopt_place(one.place, one.len)));
    next
}

proptest! {
    #[test]
    fn objects_have_places_of_their_own_with_zeros(
        steps in proptest::collection::vec(
            (0_u64..3, 1_u64..400, 0_u8..8, any::<usize>(), any::<bool>()), 1..60),
    ) {
        let (mut files, mut held) = (Files::default(), Vec::<Held>::new());
        for (of, pages, what, which, pins) in steps {
            match what {
                0..3 if !held.is_empty() => {
                    let Held { place, len, .. } = held.swap_remove(which % held.len());
                    prop_assert_eq!(files.free(place, len, pins), None, "it was not imported");
                }
                3 => files = adopted(&files, &held),
                _ => {
                    let (len, room) = (pages * PAGE_SIZE, ROOM - files.arena_bytes());
                    let Ok(place) = files.allocate(owner(of), len, what == 4, room) else {
                        prop_assert!(len > room, "there is room");
                        continue;
                    };
                    let one = Held { owner: of, place, len };
                    for at in one.ends() {
                        let page = read_page(&files, place.file, at);
                        prop_assert!(page.iter().all(|byte| *byte == 0), "an earlier object's");
                    }
                    for at in one.ends() {
                        files.write(place, at - place.start, &[0xa5; PAGE_SIZE as usize]).unwrap();
                    }
                    held.push(one);
                }
            }
            check(&files, &held)?;
        }
        for Held { place, len, .. } in held {
            files.free(place, len, true);
        }
        prop_assert_eq!((files.arena_bytes(), files.processes().count()), (0, 0));
    }
}

#[test]
fn the_number_of_files_grows_with_the_logarithm_of_the_bytes() {
    for len in [PAGE_SIZE, 64 << 10, MIB, 16 * MIB] {
        let mut files = Files::default();
        let bytes = 16_384 * len;
        // A file has no memory before it is written.
        for _ in 0..bytes / len {
            files.allocate(owner(1), len, false, u64::MAX).unwrap();
        }
        let count = files.processes().count();
        assert!(count as u64 <= 32 + bytes / MAX_ARENA, "{count} files for {len}");
        assert!(files.arena_bytes() <= bytes / 4 * 5 + MIN_ARENA, "{}", files.arena_bytes());
    }
}

#[test]
fn memory_is_refused_at_the_limits() {
    let mut files = Files::default();
    let no_more = Owner { may_add: false, ..owner(1) };
    let status = |refused: Result<ArenaPlace, Stop>| match refused {
        Err(Stop::Status(status)) => status,
        other => panic!("{other:?}"),
    };
    let refused = files.allocate(no_more, PAGE_SIZE, false, ROOM);
    assert_eq!(status(refused), status::INSUFFICIENT_RESOURCES);
    // Too little for an arena that grows: only what is needed.
    let place = files.allocate(owner(1), PAGE_SIZE, false, 2 * PAGE_SIZE).unwrap();
    assert_eq!((files.arena_bytes(), files.sole_owner(place.file)), (PAGE_SIZE, None));
    assert_eq!(status(files.allocate(owner(1), PAGE_SIZE, false, 0)), status::NO_MEMORY);
    files.allocate(owner(1), PAGE_SIZE, false, ROOM).unwrap();
    // There is room in the arena.
    files.allocate(no_more, PAGE_SIZE, false, 0).unwrap();
    assert_eq!(status(files.allocate(no_more, MIB, true, ROOM)), status::INSUFFICIENT_RESOURCES);
}

#[test]
fn a_registered_file_is_kept_once_for_those_with_the_same_rights() {
    let file = sealed_memfd(c"test", PAGE_SIZE).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let copy = || file.try_clone().unwrap();
    let mut files = Files::default();
    let first = files.add_registered(owner(1), copy()).unwrap();
    let no_more = Owner { may_add: false, ..owner(1) };
    assert_eq!(files.add_registered(no_more, copy()).unwrap(), first);
    // One who may only read gets no descriptor to write, nor does another program.
    let reader = OwnedFd::from(std::fs::File::open(path).unwrap());
    assert_ne!(files.add_registered(owner(1), reader).unwrap(), first);
    assert_ne!(files.add_registered(owner(2), copy()).unwrap(), first);
    assert_eq!(files.sole_owner(first), Some(FileId(1)));
    files.release_registered(first);
    assert!(files.file(first).is_some());
    files.release_registered(first);
    assert!(files.file(first).is_none());
}

/// A GPU whose driver has pinned a page keeps that page.
#[test]
fn freed_memory_goes_back_unless_it_is_pinned() {
    let blocks = |files: &Files, id| fstat(files.file(id).unwrap()).unwrap().st_blocks;
    for pins in [false, true] {
        let mut files = Files::default();
        let mut allocate = |len| files.allocate(owner(1), len, false, ROOM).unwrap();
        let (first, second) = (allocate(PAGE_SIZE), allocate(64 * PAGE_SIZE));
        if let Some(file) = files.by_id.get_mut(&first.file)
            && let Contents::Arena(arena) = &mut file.contents
        {
            arena.import = Some(MemoryId(3));
        }
        files.write(second, 0, &vec![0xa5; 64 * PAGE_SIZE as usize]).unwrap();
        let used = blocks(&files, first.file);
        assert_eq!(files.free(second, 64 * PAGE_SIZE, pins), None);
        assert_eq!(blocks(&files, first.file) == used, pins, "pinned: {pins}");
        assert!(read_page(&files, first.file, second.start).iter().all(|byte| *byte == 0));
        assert_eq!(files.free(first, PAGE_SIZE, pins), Some(MemoryId(3)), "with the last object");
    }
}
