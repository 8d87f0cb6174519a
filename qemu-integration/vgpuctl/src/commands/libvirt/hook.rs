//! What libvirt runs when a domain starts and ends: its vGPUs start before it and stop after it.
//!
//! libvirt waits for the hook, and the domain's XML comes on the standard input. Asking libvirt anything from here would
//! wait for ever; all that is needed is in that XML.
//!
//! | libvirt calls | and this |
//! | --- | --- |
//! | `prepare begin`, before anything of the domain is made | starts its vGPUs; a failure is libvirt's too |
//! | `start begin`, when the user that QEMU will run as is known | gives them the sockets |
//! | `release end`, when nothing of it is left, whatever ended it | stops them |
//! | `migrate begin`, on the host that a domain would move to | refuses: a vGPU stays where it is |

use std::fs::{self, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper::Method;
use integrate::domain::{Domain, NAMESPACE, Vgpu as Wanted};
use integrate::xml::MAX_BYTES;
use mdev_core::ids::VgpuId;
use nix::unistd::{Gid, Group, Uid, User};
use vfio_user_server::api::model::{CreateVgpu, StopVgpu, Version, Vgpu, VgpuState};

use super::claims::{Claim, Claims};
use crate::cli::libvirt::Hook;
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;

/// How long QEMU's end may take to be noticed by its vGPU.
const PATIENCE: Duration = Duration::from_secs(5);

/// `libvirt hook`
pub async fn hook(client: &Client, args: Hook) -> Result<(), Failure> {
    let mut xml = Vec::new();
    let limit = MAX_BYTES as u64 + 1;
    io::stdin().lock().take(limit).read_to_end(&mut xml).map_err(|error| {
        Failure::Local(format!("Cannot read the XML of domain '{}': {error}", args.domain))
    })?;
    let xml = String::from_utf8_lossy(&xml);
    // Other domains are none of our business, whatever is in their XML.
    if !xml.contains(NAMESPACE) {
        return Ok(());
    }
    let name = &args.domain;
    let domain =
        Domain::parse(&xml).map_err(|error| Failure::Local(format!("Domain '{name}' {error}")))?;
    let hook = Hooked { client, name, uuid: domain.uuid(), vgpus: domain.vgpus() };
    match (args.operation.as_str(), args.sub_operation.as_str()) {
        _ if hook.vgpus.is_empty() => Ok(()),
        ("prepare", "begin") => hook.prepare().await,
        ("start", "begin") => hook.hand_over(domain.qemu_user()).await,
        ("release", "end") => hook.release().await,
        ("migrate", "begin") => Err(Failure::NotNow(format!(
            "Domain '{name}' has a vGPU, which cannot move to another host; \
             shut it down, or detach the vGPU first"
        ))),
        _ => Ok(()),
    }
}

/// A domain that has vGPUs.
struct Hooked<'a> {
    client: &'a Client,
    name: &'a str,
    uuid: String,
    vgpus: Vec<Wanted>,
}

impl Hooked<'_> {
    async fn claims(&self) -> Result<Claims, Failure> {
        Claims::lock(&self.run_dir().await?)
            .map_err(|error| Failure::Local(format!("Cannot write down whose a vGPU is: {error}")))
    }

    async fn run_dir(&self) -> Result<PathBuf, Failure> {
        let version: Version = self.client.get("/v1/version").await?;
        Ok(version.run_dir.into())
    }

    /// Starts all vGPUs. Where one cannot be, libvirt calls `release`, which stops the others.
    async fn prepare(&self) -> Result<(), Failure> {
        let claims = self.claims().await?;
        for wanted in &self.vgpus {
            self.start(wanted, &claims)
                .await
                .map_err(|failure| self.explained(wanted, &failure))?;
        }
        Ok(())
    }

    /// A failure, as the owner of the domain reads it in libvirt's message.
    fn explained(&self, wanted: &Wanted, failure: &Failure) -> Failure {
        let what = wanted
            .mdev_type
            .as_ref()
            .map_or_else(|| format!("vGPU {}", wanted.uuid), |name| format!("vGPU of type {name}"));
        Failure::NotNow(format!("Domain '{}' cannot have its {what}: {failure}", self.name))
    }

    async fn start(&self, wanted: &Wanted, claims: &Claims) -> Result<(), Failure> {
        let uuid = wanted.uuid;
        let there = self.client.find(uuid).await?;
        let claim = claims.of(uuid);
        let ours = claim.as_ref().is_some_and(|claim| claim.domain == self.uuid);
        let mine =
            |started| Claim { domain: self.uuid.clone(), name: self.name.to_owned(), started };
        if let Some(vgpu) = there.as_ref().filter(|vgpu| vgpu.state != VgpuState::Stopped) {
            if let Some(vm) = vgpu.vm {
                return Err(Failure::NotNow(format!(
                    "it is used by process {} already{}",
                    vm.pid,
                    claim.map(|claim| format!(", of domain '{}'", claim.name)).unwrap_or_default()
                )));
            }
            match claim.filter(|_| !ours) {
                Some(claim) => {
                    return Err(Failure::NotNow(format!(
                        "it was started for domain '{}'; if that does not use it any more, \
                         `vgpuctl stop -u {uuid}`",
                        claim.name
                    )));
                }
                // Its owner started it, and stops it.
                None if !ours && vgpu.state == VgpuState::Running => {
                    return set(claims, uuid, &mine(false));
                }
                // Left over: nobody told us when the domain ended, or it has failed since.
                None => self.stop(uuid).await?,
            }
        }
        // Before it runs, so that no vGPU can be left over that nobody stops.
        set(claims, uuid, &mine(true))?;
        let started = match &wanted.mdev_type {
            Some(_) => self.create(wanted).await,
            None if there.is_some_and(|vgpu| vgpu.defined) => {
                let path = format!("{}/start", vgpu_path(uuid));
                self.client.post::<Vgpu>(&path, &()).await
            }
            None => Err(Failure::NotFound(format!(
                "it is not defined any more; define it, or detach it: vgpuctl libvirt detach {}",
                self.name
            ))),
        };
        started.map(drop).inspect_err(|_| claims.remove(uuid))
    }

    async fn create(&self, wanted: &Wanted) -> Result<Vgpu, Failure> {
        let core = wanted.core.map(|core| [("core".to_owned(), core.to_string())].into());
        let request = CreateVgpu {
            uuid: Some(wanted.uuid),
            parent: wanted.parent.clone(),
            mdev_type: wanted.mdev_type.clone(),
            attrs: core.into_iter().collect(),
            run: true,
            ..CreateVgpu::default()
        };
        self.client.post("/v1/vgpus", &request).await
    }

    /// Gives the sockets to the user that QEMU runs as, and to nobody else.
    async fn hand_over(&self, user: Option<(String, String)>) -> Result<(), Failure> {
        // Without a label QEMU runs as libvirt does, which is root.
        let Some((user, group)) = user else { return Ok(()) };
        let (user, group) = (user_id(&user)?, group_id(&group)?);
        for wanted in &self.vgpus {
            let vgpu = self.client.vgpu(wanted.uuid, None).await?;
            let Some(socket) = vgpu.socket else { continue };
            give(Path::new(&socket), user, group).map_err(|error| {
                Failure::Local(format!("Cannot give {socket} to user {user}: {error}"))
            })?;
        }
        Ok(())
    }

    /// Stops all vGPUs that were started for the domain.
    async fn release(&self) -> Result<(), Failure> {
        let claims = self.claims().await?;
        let mut result = Ok(());
        for wanted in &self.vgpus {
            // Another domain's, or nobody's since it could not be started.
            let Some(claim) = claims.of(wanted.uuid).filter(|claim| claim.domain == self.uuid)
            else {
                continue;
            };
            let stopped = if claim.started { self.stop(wanted.uuid).await } else { Ok(()) };
            match stopped {
                Ok(()) => claims.remove(wanted.uuid),
                Err(failure) => result = Err(failure),
            }
        }
        result
    }

    /// Stops a vGPU once its VM is gone. One that does not run is stopped.
    async fn stop(&self, uuid: VgpuId) -> Result<(), Failure> {
        let path = format!("{}/stop", vgpu_path(uuid));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stopped = self.client.order(Method::POST, &path, &StopVgpu { force: false }).await;
            let Err(failure) = stopped else { return Ok(()) };
            let Some(vgpu) = self.client.find(uuid).await? else { return Ok(()) };
            if vgpu.state == VgpuState::Stopped {
                return Ok(());
            }
            // A VM that has ended is noticed within milliseconds; another one is not ours to disturb.
            if vgpu.vm.is_none() || Instant::now() > deadline {
                return Err(failure);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn set(claims: &Claims, uuid: VgpuId, claim: &Claim) -> Result<(), Failure> {
    claims
        .set(uuid, claim)
        .map_err(|error| Failure::Local(format!("Cannot write down whose vGPU {uuid} is: {error}")))
}

/// A socket for one user. The folders that it is in can be passed by all, and listed by root.
fn give(socket: &Path, user: Uid, group: Gid) -> io::Result<()> {
    for folder in socket.ancestors().skip(1).take(3) {
        let mode = fs::metadata(folder)?.permissions().mode();
        if mode & 0o011 != 0o011 {
            fs::set_permissions(folder, Permissions::from_mode(mode | 0o011))?;
        }
    }
    // First nobody's, then his: at no time may others connect.
    fs::set_permissions(socket, Permissions::from_mode(0o600))?;
    chown(socket, Some(user.as_raw()), Some(group.as_raw()))
}

/// `+64055`, or a name.
fn user_id(text: &str) -> Result<Uid, Failure> {
    if let Ok(number) = text.trim_start_matches('+').parse() {
        return Ok(Uid::from_raw(number));
    }
    let found = User::from_name(text).ok().flatten().map(|user| user.uid);
    found
        .ok_or_else(|| Failure::Local(format!("There is no user {text:?}, as whom QEMU would run")))
}

fn group_id(text: &str) -> Result<Gid, Failure> {
    if let Ok(number) = text.trim_start_matches('+').parse() {
        return Ok(Gid::from_raw(number));
    }
    let found = Group::from_name(text).ok().flatten().map(|group| group.gid);
    found.ok_or_else(|| {
        Failure::Local(format!("There is no group {text:?}, as which QEMU would run"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_numbers_or_names() {
        assert_eq!(user_id("+64055").unwrap(), Uid::from_raw(64055));
        assert_eq!(user_id("root").unwrap(), Uid::from_raw(0));
        assert_eq!(group_id("+993").unwrap(), Gid::from_raw(993));
        assert!(user_id("no such user").unwrap_err().to_string().contains("no user"));
    }

    #[test]
    fn a_socket_given_away_is_one_users_and_its_folders_can_be_passed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("vgpus/a");
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
        let socket = folder.join("vfio.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        give(&socket, Uid::current(), Gid::current()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&socket)), (0o771, 0o600));
    }
}
