//! Share policies: which rights other clients have to an object.
//!
//! The rules are those of NVIDIA's driver. An object without a list of policies has that of the
//! nearest object above it, and at last [`DEFAULT`]. A client has a right if at least one policy
//! that grants the right matches the client, and no policy that requires something fails.

use nvidia_rm::abi;
use nvidia_rm::numbers::status;
use programs::front_end::Opener;
use serde::{Deserialize, Serialize};

use super::call::Stop;

/// Right to make an own object of another client's (`RS_ACCESS_DUP_OBJECT`).
pub const DUP_OBJECT: u32 = 1 << 0;

/// Rights that each client has to its own objects, and may share. The driver gives the others
/// (`RS_ACCESS_NICE` and `RS_ACCESS_PERFMON`) to administrators of the host.
pub const OWN_RIGHTS: u32 = DUP_OBJECT | 1 << 2;

/// Maximum number of policies of an object. Policies differ by the client that they name.
pub const MAX_POLICIES: usize = 16;

/// Policies of an object.
pub type ShareList = Vec<Policy>;

/// Policies of a client that has changed nothing: its own process may use its objects.
pub const DEFAULT: &[Policy] =
    &[Policy { whose: Sharers::Process, is_required: false, rights: DUP_OBJECT }];

/// Clients that a policy matches (`RS_SHARE_TYPE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharers {
    /// No client.
    None,
    /// All clients of the vGPU.
    All,
    /// Clients of the same user or process.
    User,
    /// One client.
    Client(u32),
    /// Clients of the same process.
    Process,
    /// Clients in the same partition of the GPU.
    Partition,
    /// Clients that use the same GPU.
    Gpu,
    /// The manager of the links between GPUs.
    FabricManager,
}

/// A policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Clients that the policy matches.
    pub whose: Sharers,
    /// Other clients lose the rights, instead of these having them.
    pub is_required: bool,
    /// Rights (`RS_ACCESS_*`), one bit each.
    pub rights: u32,
}

/// Change of an object's policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Policy that is added, or whose rights are taken away.
    pub policy: Policy,
    /// The rights are taken away.
    pub revokes: bool,
    /// The other policies remain.
    pub composes: bool,
}

/// Two clients: that of an object, and another.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// Process of the object's client.
    pub owner: Opener,
    /// Process of the other client.
    pub other: Opener,
    /// Handle of the other client.
    pub client: u32,
}

impl TryFrom<abi::SharePolicy> for Change {
    type Error = Stop;

    fn try_from(from: abi::SharePolicy) -> Result<Self, Stop> {
        const REVOKE: u8 = 1 << 0;
        const REQUIRE: u8 = 1 << 1;
        const COMPOSE: u8 = 1 << 2;
        let whose = match from.kind {
            0 => Sharers::None,
            1 => Sharers::All,
            2 => Sharers::User,
            3 => Sharers::Client(from.target),
            4 => Sharers::Process,
            5 => Sharers::Partition,
            6 => Sharers::Gpu,
            7 => Sharers::FabricManager,
            _ => return Err(Stop::Status(status::INVALID_ARGUMENT)),
        };
        let is_required = from.action & REQUIRE != 0;
        Ok(Self {
            policy: Policy { whose, is_required, rights: from.rights },
            revokes: from.action & REVOKE != 0,
            composes: from.action & COMPOSE != 0,
        })
    }
}

impl Policy {
    fn matches(&self, pair: &Pair) -> bool {
        match self.whose {
            Sharers::None | Sharers::FabricManager => false,
            Sharers::All => true,
            Sharers::User => {
                pair.owner.is_same_process(&pair.other) || pair.owner.is_same_user(&pair.other)
            }
            Sharers::Client(client) => client == pair.client,
            Sharers::Process => pair.owner.is_same_process(&pair.other),
            // The driver exempts memory objects, the only ones that can be shared here.
            Sharers::Partition | Sharers::Gpu => self.is_required,
        }
    }

    /// Returns whether the driver merges two policies.
    fn is_about_same(&self, other: &Self) -> bool {
        (self.whose, self.is_required) == (other.whose, other.is_required)
    }
}

/// Changes the policies of an object. `active` is the list in force so far.
pub fn changed(active: &[Policy], change: &Change) -> Result<ShareList, Stop> {
    let Change { policy, revokes, composes } = change;
    let mut list = if *composes { active.to_vec() } else { ShareList::new() };
    let found = list.iter_mut().find(|known| known.is_about_same(policy));
    match (found, revokes) {
        (Some(known), true) => known.rights &= !policy.rights,
        (Some(known), false) => known.rights |= policy.rights,
        (None, true) => {}
        (None, false) => list.push(*policy),
    }
    list.retain(|known| known.rights != 0);
    if list.len() > MAX_POLICIES {
        return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
    }
    Ok(list)
}

/// Returns the rights that policies give to the other client.
pub fn rights(list: &[Policy], pair: &Pair) -> u32 {
    let (mut granted, mut denied) = (0, 0);
    for policy in list {
        match (policy.matches(pair), policy.is_required) {
            (true, false) => granted |= policy.rights,
            (false, true) => denied |= policy.rights,
            _ => {}
        }
    }
    granted & !denied
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHARERS: [Sharers; 9] = [
        Sharers::None,
        Sharers::All,
        Sharers::User,
        Sharers::Client(1),
        Sharers::Client(2),
        Sharers::Process,
        Sharers::Partition,
        Sharers::Gpu,
        Sharers::FabricManager,
    ];

    fn change() -> impl Strategy<Value = Change> {
        (0..SHARERS.len(), 0_u32..8, any::<[bool; 3]>()).prop_map(
            |(whose, rights, [is_required, revokes, composes])| Change {
                policy: Policy { whose: SHARERS[whose], is_required, rights },
                revokes,
                composes,
            },
        )
    }

    fn pair() -> impl Strategy<Value = Pair> {
        let opener =
            || (0..3, 0_u32..3).prop_map(|(pid, user)| Opener::new(pid, user.checked_sub(1)));
        (opener(), opener(), 1_u32..4).prop_map(|(owner, other, client)| Pair {
            owner,
            other,
            client,
        })
    }

    fn list() -> impl Strategy<Value = ShareList> {
        proptest::collection::vec(change(), 0..8).prop_map(|changes| {
            let add = |list: ShareList, change: &Change| changed(&list, change).unwrap();
            changes.iter().fold(DEFAULT.to_vec(), add)
        })
    }

    proptest! {
        /// Whatever the list: a revocation of grants, and each requirement, takes rights only.
        #[test]
        fn revoking_and_requiring_never_give_a_right(
            list in list(), mut change in change(), pair in pair(),
        ) {
            let before = rights(&list, &pair);
            change.revokes = !change.policy.is_required;
            let after = rights(&changed(&list, &change).unwrap(), &pair);
            prop_assert_eq!(after & !before, 0);
            prop_assert!(change.composes || after == 0, "no grant is left");
        }

        /// A policy that is added and revoked leaves no trace of its rights.
        #[test]
        fn what_is_revoked_is_as_if_it_never_was(
            list in list(), mut change in change(), pair in pair(),
        ) {
            change.composes = true;
            change.revokes = false;
            let added = changed(&list, &change).unwrap();
            change.revokes = true;
            let revoked = changed(&added, &change).unwrap();
            prop_assert_eq!(&revoked, &changed(&list, &change).unwrap());
            if !change.policy.is_required {
                prop_assert_eq!(rights(&revoked, &pair) & !rights(&list, &pair), 0);
            }
        }

        /// Of unknown processes and users none is the same as another.
        #[test]
        fn only_what_is_known_matches(rights in 1_u32..8, owner in 0_i32..2, other in 0_i32..2) {
            let [owner, other] = [owner, other].map(|pid| Opener::new(-pid, None));
            let pair = Pair { owner, other, client: 1 };
            for whose in [Sharers::Process, Sharers::User] {
                let policy = Policy { whose, is_required: false, rights };
                prop_assert_eq!(super::rights(&[policy], &pair), 0);
            }
        }
    }

    #[test]
    fn policies_are_limited() {
        let grant = |client| Change {
            policy: Policy { whose: Sharers::Client(client), is_required: false, rights: 1 },
            revokes: false,
            composes: true,
        };
        let mut list = ShareList::new();
        for client in 0..MAX_POLICIES as u32 {
            list = changed(&list, &grant(client)).unwrap();
        }
        assert_eq!(changed(&list, &grant(3)).unwrap(), list, "known already");
        let refused = changed(&list, &grant(99));
        assert!(matches!(refused, Err(Stop::Status(status::INSUFFICIENT_RESOURCES))));
    }
}
