//! Memory that processes share with each other, as CUDA's IPC does.

use cuda_socket::{FileId, Node};
use mdev_core::units::MIB;
use programs::FrontEnd;
use programs::front_end::Opener;

use crate::program::{CONTROL, Program, memory_params, word, words};

const OK: u32 = 0;
const INSUFFICIENT_RESOURCES: u32 = 0x1a;
const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
const INVALID_ARGUMENT: u32 = 0x1f;
const INVALID_CLIENT: u32 = 0x23;
const OBJECT_NOT_FOUND: u32 = 0x57;

/// `RS_SHARE_TYPE_*`.
const NONE: u32 = 0;
const ALL: u32 = 1;
const USER: u32 = 2;
const CLIENT: u32 = 3;
const PROCESS: u32 = 4;
const PARTITION: u32 = 5;
const GPU: u32 = 6;
const FABRIC_MANAGER: u32 = 7;

/// `RS_SHARE_ACTION_FLAG_*`.
const GRANT: u32 = 0;
const REVOKE: u32 = 1;
const REQUIRE: u32 = 2;
const COMPOSE: u32 = 4;

/// `RS_ACCESS_*`.
const DUP_OBJECT: u32 = 1;
const NICE: u32 = 2;
const EVERYTHING: u32 = u32::MAX;

const MEMORY: u32 = 0x20;
const OWNER_USER: u32 = 1000;

/// A client of the resource manager, and the control file on which it was made.
#[derive(Clone, Copy)]
struct Other {
    file: FileId,
    root: u32,
}

/// A program of process 1 with an object, among others.
struct Programs {
    program: Program,
    owner: Other,
    others: u64,
}

impl Programs {
    fn start() -> Self {
        let mut program = Program::start();
        program.front_end.close(&mut program.client, CONTROL);
        program.front_end.open(CONTROL, Node::Control, Opener::new(1, Some(OWNER_USER))).unwrap();
        let context = program.context();
        let memory = memory_params(4 * MIB, 2 * MIB);
        program.new_object(context.root, context.device, MEMORY, 0x40, &memory);
        let owner = Other { file: CONTROL, root: context.root };
        Self { program, owner, others: 0 }
    }

    fn ioctl(&mut self, file: FileId, request: u32, argument: &[u32], status: usize) -> u32 {
        let done = self.program.ioctl_with(file, request, words(argument), None, &[]);
        assert_eq!(done.errno, 0);
        word(&done.argument, status)
    }

    /// Starts another program.
    fn start_other(&mut self, process: i32, user: Option<u32>) -> Other {
        self.start_as(Opener::new(process, user))
    }

    fn start_as(&mut self, opener: Opener) -> Other {
        self.others += 1;
        let file = FileId(100 + self.others);
        self.program.front_end.open(file, Node::Control, opener).unwrap();
        let root = self.program.ioctl_with(file, 0xc030_462b, vec![0; 48], None, &[]);
        Other { file, root: word(&root.argument, 2) }
    }

    /// Changes policies. Returns the status.
    fn share_with(&mut self, kind: u32, target: u32, action: u32, rights: u32) -> u32 {
        self.share_object(MEMORY, kind, target, action, rights)
    }

    fn share_object(
        &mut self,
        object: u32,
        kind: u32,
        target: u32,
        action: u32,
        rights: u32,
    ) -> u32 {
        let policy = [target, rights, kind | action << 16];
        let argument = [&[self.owner.root, object][..], &policy, &[0xffff]].concat();
        self.ioctl(CONTROL, 0xc018_4635, &argument, 5)
    }

    fn share(&mut self, kind: u32, action: u32) -> u32 {
        self.share_with(kind, self.owner.root, action, DUP_OBJECT)
    }

    /// Makes an object of another client of the memory, and frees it. Returns the status.
    fn take(&mut self, by: Other) -> u32 {
        let argument = [by.root, by.root, 0x30, self.owner.root, MEMORY, 0, 0xffff];
        let status = self.ioctl(by.file, 0xc01c_4634, &argument, 6);
        if status == OK {
            let free = [by.root, by.root, 0x30, 0xffff];
            assert_eq!(self.ioctl(by.file, 0xc010_4629, &free, 3), OK);
        }
        status
    }
}

#[test]
fn a_later_process_with_the_same_id_is_another() {
    let mut all = Programs::start();
    let same = all.start_as(Opener::new(1, None));
    assert_eq!(all.take(same), OK);
    let later = all.start_as(Opener::new(1, None).with_instance(9));
    assert_eq!(all.take(later), INSUFFICIENT_PERMISSIONS);
}

#[test]
fn a_process_uses_memory_that_another_shares() {
    let mut all = Programs::start();
    let other = all.start_other(2, Some(OWNER_USER));
    assert_eq!(all.take(other), INSUFFICIENT_PERMISSIONS);
    assert_eq!(all.share(ALL, GRANT), OK);
    let duplicate = [other.root, other.root, 0x30, all.owner.root, MEMORY, 0, 0xffff];
    assert_eq!(all.ioctl(other.file, 0xc01c_4634, &duplicate, 6), OK);
    // It outlives the process that allocated it.
    let Program { front_end, client, .. } = &mut all.program;
    front_end.close(client, CONTROL);
    assert_eq!(front_end.used_video_bytes(), 4 * MIB);
    front_end.close(client, other.file);
    assert_eq!(front_end.used_video_bytes(), 0);
}

#[test]
fn a_revocation_shares_nothing() {
    for kind in NONE..=FABRIC_MANAGER {
        for action in [REVOKE, REVOKE | REQUIRE, REVOKE | COMPOSE, REVOKE | REQUIRE | COMPOSE] {
            let mut all = Programs::start();
            let other = all.start_other(2, Some(OWNER_USER));
            assert_eq!(all.share_with(kind, other.root, action, EVERYTHING), OK);
            let taken = all.take(other);
            assert_eq!(taken, INSUFFICIENT_PERMISSIONS, "type {kind}, action {action}");
        }
    }
}

#[test]
fn what_was_shared_can_be_revoked() {
    let mut all = Programs::start();
    let other = all.start_other(2, Some(OWNER_USER));
    for kind in [ALL, USER, CLIENT] {
        assert_eq!(all.share_with(kind, other.root, COMPOSE, DUP_OBJECT), OK);
        assert_eq!(all.take(other), OK);
        assert_eq!(all.share_with(kind, other.root, REVOKE | COMPOSE, EVERYTHING), OK);
        assert_eq!(all.take(other), INSUFFICIENT_PERMISSIONS, "type {kind}");
    }
    // Without COMPOSE, nothing of the earlier policies is left.
    assert_eq!(all.share(ALL, GRANT), OK);
    assert_eq!(all.share(NONE, GRANT), OK);
    assert_eq!(all.take(other), INSUFFICIENT_PERMISSIONS);
    let same_process = all.start_other(1, Some(OWNER_USER));
    assert_eq!(all.take(same_process), INSUFFICIENT_PERMISSIONS);
}

#[test]
fn each_type_matches_its_clients() {
    // The same process, the same user, another user, unknown ones, and the client that is named.
    let taken = |kind, action| {
        let mut all = Programs::start();
        let processes =
            [(1, Some(7)), (2, Some(OWNER_USER)), (3, Some(7)), (0, None), (4, Some(8))];
        let others = processes.map(|(process, user)| all.start_other(process, user));
        assert_eq!(all.share_with(kind, others[4].root, action, DUP_OBJECT), OK);
        others.map(|other| u8::from(all.take(other) == OK))
    };
    assert_eq!(taken(NONE, GRANT), [0, 0, 0, 0, 0]);
    assert_eq!(taken(ALL, GRANT), [1, 1, 1, 1, 1]);
    assert_eq!(taken(USER, GRANT), [1, 1, 0, 0, 0]);
    assert_eq!(taken(CLIENT, GRANT), [0, 0, 0, 0, 1]);
    assert_eq!(taken(PROCESS, GRANT), [1, 0, 0, 0, 0]);
    for kind in [PARTITION, GPU, FABRIC_MANAGER] {
        assert_eq!(taken(kind, GRANT), [0, 0, 0, 0, 0]);
    }
    // The policy of clients that share nothing stays.
    assert_eq!(taken(CLIENT, COMPOSE), [1, 0, 0, 0, 1]);
    assert_eq!(taken(CLIENT, REQUIRE | COMPOSE), [0, 0, 0, 0, 0]);
    assert_eq!(taken(USER, REQUIRE | COMPOSE), [1, 0, 0, 0, 0]);
    assert_eq!(taken(NONE, REQUIRE | COMPOSE), [0, 0, 0, 0, 0]);
    assert_eq!(taken(GPU, REQUIRE | COMPOSE), [1, 0, 0, 0, 0]);
}

#[test]
fn requirements_restrict_grants() {
    let mut all = Programs::start();
    let same_user = all.start_other(2, Some(OWNER_USER));
    let another = all.start_other(3, Some(7));
    assert_eq!(all.share(ALL, GRANT), OK);
    assert_eq!(all.share(USER, REQUIRE | COMPOSE), OK);
    assert_eq!(all.take(same_user), OK);
    assert_eq!(all.take(another), INSUFFICIENT_PERMISSIONS);
}

#[test]
fn objects_have_the_policies_of_those_above_them() {
    const INHERITED_SHARE_POLICY: u32 = 0xd04;
    let mut all = Programs::start();
    let other = all.start_other(2, Some(OWNER_USER));
    let root = all.owner.root;
    let policy = words(&[root, DUP_OBJECT, ALL]);
    let (status, _) = all.program.control(root, root, INHERITED_SHARE_POLICY, &policy);
    assert_eq!((status, all.take(other)), (OK, OK));
    let policy = words(&[root, DUP_OBJECT, ALL | REVOKE << 16]);
    let (status, _) = all.program.control(root, root, INHERITED_SHARE_POLICY, &policy);
    assert_eq!((status, all.take(other)), (OK, INSUFFICIENT_PERMISSIONS));
    // The client itself is an object, too; one between has precedence.
    assert_eq!(all.share_object(root, ALL, 0, GRANT, DUP_OBJECT), OK);
    assert_eq!(all.take(other), OK);
    assert_eq!(all.share(ALL, REVOKE), OK);
    assert_eq!(all.take(other), INSUFFICIENT_PERMISSIONS);
}

#[test]
fn the_driver_refuses_wrong_policies() {
    let mut all = Programs::start();
    let other = all.start_other(2, Some(OWNER_USER));
    assert_eq!(all.share(FABRIC_MANAGER + 1, GRANT), INVALID_ARGUMENT);
    assert_eq!(all.share_with(CLIENT, 0x1234, GRANT, DUP_OBJECT), INVALID_CLIENT);
    for rights in [NICE, EVERYTHING] {
        assert_eq!(all.share_with(ALL, 0, GRANT, rights), INSUFFICIENT_PERMISSIONS);
    }
    assert_eq!(all.share_object(0x99, ALL, 0, GRANT, DUP_OBJECT), OBJECT_NOT_FOUND);
    // Only its own client shares an object.
    let share = [all.owner.root, MEMORY, 0, DUP_OBJECT, ALL, 0xffff];
    assert_eq!(all.ioctl(other.file, 0xc018_4635, &share, 5), INVALID_CLIENT);
    assert_eq!(all.take(other), INSUFFICIENT_PERMISSIONS);
}

#[test]
fn a_grant_ends_with_the_client_that_it_names() {
    let mut all = Programs::start();
    for _ in 0..40 {
        let other = all.start_other(2, None);
        assert_eq!(all.share_with(CLIENT, other.root, COMPOSE, DUP_OBJECT), OK);
        assert_eq!(all.take(other), OK);
        all.program.front_end.close(&mut all.program.client, other.file);
    }
    let others: Vec<_> = (0..20).map(|_| all.start_other(2, None)).collect();
    let shared = others.iter().map(|it| all.share_with(CLIENT, it.root, COMPOSE, DUP_OBJECT));
    let statuses: Vec<_> = shared.collect();
    // One policy is that of the process.
    assert!(statuses[..15].iter().all(|status| *status == OK), "{statuses:x?}");
    assert!(statuses[15..].iter().all(|status| *status == INSUFFICIENT_RESOURCES), "{statuses:x?}");
}
