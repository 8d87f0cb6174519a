//! Permissions on the control socket, by the user of a connection.
//!
//! The kernel reports user and groups of a client when it connects. Root and vgpud's own user have
//! all permissions, as have the members of the group of administrators. Members of the group of
//! readers may read. Screenshots show guests' data, so they need the permission of an
//! administrator.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::connect_info::ConnectInfo;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use nix::sys::socket::{getsockopt, sockopt};

use crate::http::HttpError;
use crate::log_limiter::LogLimiter;
use crate::sys;

use vgpud_api::{ErrorCode, ErrorDetail};
use vgpud_host::users::Users;

/// Client of a connection, as the kernel reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Process ID.
    pub pid: i32,
    /// User ID; `None` if the kernel does not report it.
    pub uid: Option<u32>,
    /// Group IDs.
    pub groups: BTreeSet<u32>,
}

impl Peer {
    /// Returns the client at the other end of a socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let socket = socket.as_fd();
        let credentials = getsockopt(&socket, sockopt::PeerCredentials)?;
        let mut groups: BTreeSet<u32> = sys::peer_groups(socket)?.into_iter().collect();
        groups.insert(credentials.gid());
        Ok(Self { pid: credentials.pid(), uid: Some(credentials.uid()), groups })
    }
}

/// User of the client that sends a request, for vGPUs that it starts.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub Option<u32>);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get::<ConnectInfo<Peer>>().and_then(|info| info.0.uid)))
    }
}

/// Permission level of a client, and level that a route needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No permission.
    None,
    /// Permission to read state and statistics.
    Read,
    /// All permissions.
    Admin,
}

/// Group of users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Name or number, as given on the command line.
    pub name: String,
    /// Group ID.
    pub gid: u32,
}

/// Permissions of users and groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// User that vgpud runs as. This user and root have all permissions.
    pub own: u32,
    /// Group with permission to read. Without this group, only administrators may read.
    pub readers: Option<Group>,
    /// Group with all permissions.
    pub admins: Option<Group>,
}

impl Rules {
    /// Returns the level of a client.
    pub fn level(&self, peer: &Peer) -> Level {
        let member = |group: &Option<Group>| {
            group.as_ref().is_some_and(|group| peer.groups.contains(&group.gid))
        };
        match peer.uid {
            Some(uid) if uid == 0 || uid == self.own => Level::Admin,
            Some(_) if member(&self.admins) => Level::Admin,
            Some(_) if member(&self.readers) => Level::Read,
            _ => Level::None,
        }
    }

    /// Describes why a client at level `has` is refused, and the group that has the permission.
    fn refusal(&self, peer: &Peer, has: Level) -> ErrorDetail {
        let users = Users::read();
        let name = peer.uid.and_then(|uid| users.name(uid));
        let user = match (peer.uid, name) {
            (None, _) => "A client of unknown user".to_owned(),
            (Some(uid), Some(name)) => format!("User {name} ({uid})"),
            (Some(uid), None) => format!("User {uid}"),
        };
        let login = name.unwrap_or("USER");
        let group = if has == Level::Read { &self.admins } else { &self.readers };
        let problem = if has == Level::Read { "may read, not change" } else { "may not use vgpud" };
        let remedy = match group {
            Some(Group { name, .. }) => {
                format!(
                    "members of group {name} may: `usermod -aG {name} {login}`, then log in again"
                )
            }
            None => "root may".to_owned(),
        };
        ErrorDetail::new(ErrorCode::Forbidden, format!("{user} {problem}; {remedy}"))
    }
}

/// Access check with its rules.
#[derive(Debug)]
pub struct Guard {
    rules: Rules,
    /// Limit for log lines that any client can cause.
    log_limiter: Mutex<LogLimiter>,
}

/// Access check for one route, or for requests without a route.
#[derive(Clone, Debug)]
pub struct RouteGuard {
    guard: Arc<Guard>,
    /// Level of the route; `None` for requests without a route.
    level: Option<Level>,
}

impl Guard {
    /// Creates a check with these rules.
    pub fn new(rules: Rules) -> Arc<Self> {
        Arc::new(Self { rules, log_limiter: Mutex::new(LogLimiter::new(Instant::now())) })
    }

    /// Returns the check for a route that needs `level`.
    pub fn for_route(self: &Arc<Self>, level: Level) -> RouteGuard {
        RouteGuard { guard: Arc::clone(self), level: Some(level) }
    }

    /// Returns the check for requests without a route.
    pub fn for_other_requests(self: &Arc<Self>) -> RouteGuard {
        RouteGuard { guard: Arc::clone(self), level: None }
    }
}

/// Returns the level for a method without a route.
fn level_without_route(method: &Method) -> Level {
    if matches!(*method, Method::GET | Method::HEAD) { Level::Read } else { Level::Admin }
}

/// Passes a request to its handler if the client has the level, or else refuses it. A client of
/// unknown user is refused.
pub async fn check(State(route): State<RouteGuard>, request: Request, next: Next) -> Response {
    let unknown = Peer::default();
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map_or(&unknown, |info| &info.0);
    let RouteGuard { guard, level } = route;
    let needs = level.unwrap_or_else(|| level_without_route(request.method()));
    let has = guard.rules.level(peer);
    let uid = peer.uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
    let line = format!("{} {}", request.method(), request.uri().path());
    if has < needs {
        let mut log_limiter = guard.log_limiter.lock().unwrap_or_else(PoisonError::into_inner);
        match log_limiter.pass(Instant::now()) {
            None => {}
            Some(0) => log::warn!("Refused to user {uid}, process {}: {line:?}", peer.pid),
            Some(suppressed) => log::warn!(
                "Refused to user {uid}, process {}: {line:?} ({suppressed} lines suppressed)",
                peer.pid
            ),
        }
        drop(log_limiter);
        return HttpError(guard.rules.refusal(peer, has)).into_response();
    }
    if needs == Level::Admin {
        log::info!("User {uid}, process {}: {line:?}", peer.pid);
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
    fn level_follows_from_user_and_groups() {
        for (uid, groups, level) in [
            (0, &[][..], Level::Admin),
            (500, &[], Level::Admin),
            (1000, &[1000, 991], Level::Admin),
            (1000, &[990, 991], Level::Admin),
            (1000, &[27, 990], Level::Read),
            (1000, &[0, 27], Level::None),
        ] {
            assert_eq!(rules().level(&peer(uid, groups)), level, "{uid} {groups:?}");
        }
        let unknown = Peer { groups: [991].into(), ..Peer::default() };
        assert_eq!(rules().level(&unknown), Level::None);
        let message = rules().refusal(&unknown, Level::None).message;
        assert!(message.starts_with("A client of unknown user may not use vgpud"), "{message}");
        let closed = Rules { own: 500, ..Rules::default() };
        assert_eq!(closed.level(&peer(1000, &[990, 991])), Level::None);
    }

    #[test]
    fn requests_without_a_route_need_the_level_of_their_method() {
        for (method, level) in [
            (Method::GET, Level::Read),
            (Method::HEAD, Level::Read),
            (Method::POST, Level::Admin),
            (Method::PATCH, Level::Admin),
            (Method::DELETE, Level::Admin),
            (Method::PUT, Level::Admin),
            (Method::OPTIONS, Level::Admin),
        ] {
            assert_eq!(level_without_route(&method), level, "{method}");
        }
    }

    #[test]
    fn refusal_names_the_missing_group() {
        let rules = rules();
        let message = |has| rules.refusal(&peer(4_000_000, &[]), has).message;
        assert_eq!(
            message(Level::Read),
            "User 4000000 may read, not change; members of group vgpu-admin may: \
             `usermod -aG vgpu-admin USER`, then log in again"
        );
        assert!(message(Level::None).contains("may not use vgpud; members of group vgpu may"));
        let closed = Rules::default().refusal(&peer(4_000_000, &[]), Level::None).message;
        assert!(closed.ends_with("root may"), "{closed}");
    }
}
