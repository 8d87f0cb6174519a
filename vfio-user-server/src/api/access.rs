//! Who may do what on the control socket, told by who is at its other end.
//!
//! The kernel says who that is, when the connection is made: user, group, and the groups besides. Root and the user
//! that vgpud runs as may do everything, members of one group everything too, members of another may look. Looking
//! ends where guests' contents begin: a picture of a VM's screen is for those who may change it.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use nix::sys::socket::{getsockopt, sockopt};
use tokio::net::UnixListener;

use super::model::{ErrorCode, ErrorDetail};
use crate::sys;
use crate::users::Users;
use crate::worker::throttle::Throttle;

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its process.
    pub pid: i32,
    /// Its user; `None` where the kernel does not say.
    pub uid: Option<u32>,
    /// Its groups.
    pub groups: BTreeSet<u32>,
}

impl Peer {
    /// Asks the kernel.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let socket = socket.as_fd();
        let credentials = getsockopt(&socket, sockopt::PeerCredentials)?;
        let mut groups: BTreeSet<u32> = sys::peer_groups(socket)?.into_iter().collect();
        groups.insert(credentials.gid());
        Ok(Self { pid: credentials.pid(), uid: Some(credentials.uid()), groups })
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self::of(stream.io()).unwrap_or_else(|error| {
            log::warn!("Who connected to the control socket is not known: {error}");
            Self::default()
        })
    }
}

/// How much somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    Nothing,
    /// Look: what there is, and how it is.
    Read,
    /// Everything.
    Admin,
}

/// A group with its name, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// As it was given.
    pub name: String,
    /// Its number.
    pub gid: u32,
}

/// Who may do what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// May do everything, besides root: whom vgpud runs as.
    pub own: u32,
    /// Members may look; nobody but administrators where there is none.
    pub readers: Option<Group>,
    /// Members may do everything.
    pub admins: Option<Group>,
}

impl Rules {
    /// How much that one may do.
    pub fn level(&self, peer: &Peer) -> Level {
        let member = |group: &Option<Group>| {
            group.as_ref().is_some_and(|group| peer.groups.contains(&group.gid))
        };
        match peer.uid {
            Some(uid) if uid == 0 || uid == self.own => Level::Admin,
            Some(_) if member(&self.admins) => Level::Admin,
            Some(_) if member(&self.readers) => Level::Read,
            _ => Level::Nothing,
        }
    }

    /// Why that one may not do it, and what to do about it.
    fn refusal(&self, peer: &Peer, has: Level) -> ErrorDetail {
        let who = peer.uid.map_or_else(
            || "This process has no user here".to_owned(),
            |uid| match Users::read().name(uid) {
                Some(name) => format!("User {name} ({uid})"),
                None => format!("User {uid}"),
            },
        );
        let group = if has == Level::Read { &self.admins } else { &self.readers };
        let can = if has == Level::Read { "may look, not change" } else { "may not use vgpud" };
        let remedy = match group {
            Some(Group { name, .. }) => {
                format!("members of group {name} may: `usermod -aG {name} USER`, then log in again")
            }
            None => "root may".to_owned(),
        };
        ErrorDetail::new(ErrorCode::Forbidden, format!("{who} {can}; {remedy}"))
    }
}

/// The rules, at work.
#[derive(Debug)]
pub struct Guard {
    rules: Rules,
    /// For lines that anybody can cause.
    throttle: Mutex<Throttle>,
}

impl Guard {
    /// Keeps these rules.
    pub fn new(rules: Rules) -> Arc<Self> {
        Arc::new(Self { rules, throttle: Mutex::new(Throttle::new(Instant::now())) })
    }
}

/// What a request takes.
fn needed(method: &Method, path: &str) -> Level {
    // Paths are matched as they are sent: one that is written in another way is none.
    let looks = matches!(*method, Method::GET | Method::HEAD);
    if looks && !path.ends_with("/screenshot") { Level::Read } else { Level::Admin }
}

/// Lets a request through, or says why not. What comes from nobody known is refused.
pub async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let unknown = Peer::default();
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map_or(&unknown, |info| &info.0);
    let path = request.uri().path();
    let (needs, has) = (needed(request.method(), path), guard.rules.level(peer));
    let uid = peer.uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
    let what = format!("{} {path}", request.method());
    if has < needs {
        let mut throttle = guard.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        match throttle.pass(Instant::now()) {
            None => {}
            Some(0) => log::warn!("Refused to user {uid}, process {}: {what:?}", peer.pid),
            Some(held) => log::warn!(
                "Refused to user {uid}, process {}: {what:?} ({held} lines were held back before)",
                peer.pid
            ),
        }
        drop(throttle);
        return guard.rules.refusal(peer, has).into_response();
    }
    if needs == Level::Admin {
        log::info!("User {uid}, process {}: {what:?}", peer.pid);
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        let group = |name: &str, gid| Some(Group { name: name.into(), gid });
        Rules { own: 500, readers: group("vgpu", 990), admins: group("vgpu-admin", 991) }
    }

    fn peer(uid: u32, groups: &[u32]) -> Peer {
        Peer { pid: 1, uid: Some(uid), groups: groups.iter().copied().collect() }
    }

    #[test]
    fn root_and_our_own_user_and_two_groups_get_in() {
        for (uid, groups, level) in [
            (0, &[][..], Level::Admin),
            (500, &[], Level::Admin),
            (1000, &[1000, 991], Level::Admin),
            (1000, &[990, 991], Level::Admin),
            (1000, &[27, 990], Level::Read),
            (1000, &[0, 27], Level::Nothing),
        ] {
            assert_eq!(rules().level(&peer(uid, groups)), level, "{uid} {groups:?}");
        }
        let nobody_known = Peer { groups: [991].into(), ..Peer::default() };
        assert_eq!(rules().level(&nobody_known), Level::Nothing);
        let said = rules().refusal(&nobody_known, Level::Nothing).message;
        assert!(said.starts_with("This process has no user here may not use"), "{said}");
        let closed = Rules { own: 500, ..Rules::default() };
        assert_eq!(closed.level(&peer(1000, &[990, 991])), Level::Nothing);
    }

    #[test]
    fn looking_is_no_more_than_looking() {
        assert_eq!(needed(&Method::GET, "/v1/vgpus"), Level::Read);
        assert_eq!(
            needed(&Method::GET, "/v1/vgpus/7f0c1e6a-2b1d-4a55-9d53-5c0f8e1a0001/screenshot"),
            Level::Admin
        );
        for method in [Method::POST, Method::PATCH, Method::DELETE, Method::PUT, Method::OPTIONS] {
            assert_eq!(needed(&method, "/v1/vgpus"), Level::Admin);
        }
    }

    #[test]
    fn a_refusal_names_the_group_that_is_missing() {
        let rules = rules();
        let message = |has| rules.refusal(&peer(4_000_000, &[]), has).message;
        assert_eq!(
            message(Level::Read),
            "User 4000000 may look, not change; members of group vgpu-admin may: \
             `usermod -aG vgpu-admin USER`, then log in again"
        );
        assert!(message(Level::Nothing).contains("may not use vgpud; members of group vgpu may"));
        let closed = Rules::default().refusal(&peer(4_000_000, &[]), Level::Nothing).message;
        assert!(closed.ends_with("root may"), "{closed}");
    }
}
