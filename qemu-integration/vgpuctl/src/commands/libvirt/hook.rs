//! What libvirt runs when a domain starts and ends: its vGPUs start before it and stop after it.
//!
//! libvirt waits for the hook, and the domain's XML comes on the standard input. Asking libvirt anything from here would
//! wait for ever; all that is needed is in that XML.
//!
//! | libvirt calls | and this |
//! | --- | --- |
//! | `prepare begin`, before anything of the domain is made | starts its vGPUs; a failure is libvirt's too |
//! | `start begin`, when libvirt has chosen whom QEMU will run as | makes sure that the sockets are his |
//! | `release end`, when nothing of it is left, whatever ended it | stops them |
//! | `migrate begin`, on the host that a domain would move to | refuses: a vGPU stays where it is |

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hyper::Method;
use integrate::domain::{Domain, NAMESPACE, Vgpu as Wanted};
use integrate::xml::MAX_BYTES;
use mdev_core::ids::VgpuId;
use vfio_user_server::api::model::{CreateVgpu, StartVgpu, StopVgpu, Version, Vgpu, VgpuState};
use vfio_user_server::users::{Account, Users};

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
    let starts = matches!(args.operation.as_str(), "prepare" | "start");
    let owner = domain.qemu_user().filter(|_| starts).map(|user| owner(&user)).transpose()?;
    let hook = Hooked { client, name, uuid: domain.uuid(), vgpus: domain.vgpus(), owner };
    match (args.operation.as_str(), args.sub_operation.as_str()) {
        _ if hook.vgpus.is_empty() => Ok(()),
        ("prepare", "begin") => hook.prepare().await,
        ("start", "begin") => hook.hand_over().await,
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
    /// Whom QEMU runs as, where the XML says so: before `start` only where its owner has chosen.
    owner: Option<Account>,
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
        self.begin(wanted, there.is_some_and(|vgpu| vgpu.defined), claims).await
    }

    /// Starts a vGPU that does not run.
    async fn begin(&self, wanted: &Wanted, defined: bool, claims: &Claims) -> Result<(), Failure> {
        let owner = self.owner.map(|Account { uid, gid }| format!("{uid}:{gid}"));
        let started = match &wanted.mdev_type {
            Some(_) => self.create(wanted, owner).await,
            None if defined => {
                let path = format!("{}/start", vgpu_path(wanted.uuid));
                self.client.post::<Vgpu>(&path, &StartVgpu { owner, ..StartVgpu::default() }).await
            }
            None => Err(Failure::NotFound(format!(
                "it is not defined any more; define it, or detach it: vgpuctl libvirt detach {}",
                self.name
            ))),
        };
        started.map(drop).inspect_err(|_| claims.remove(wanted.uuid))
    }

    async fn create(&self, wanted: &Wanted, owner: Option<String>) -> Result<Vgpu, Failure> {
        let core = wanted.core.map(|core| ("core".to_owned(), core.to_string()));
        let owner = owner.map(|owner| ("owner".to_owned(), owner));
        let request = CreateVgpu {
            uuid: Some(wanted.uuid),
            parent: wanted.parent.clone(),
            mdev_type: wanted.mdev_type.clone(),
            attrs: core.into_iter().chain(owner).map(|attr| [attr].into()).collect(),
            run: true,
            ..CreateVgpu::default()
        };
        self.client.post("/v1/vgpus", &request).await
    }

    /// Makes sure that the sockets are the user's that QEMU runs as. Most often he is the one that vgpud gives them to
    /// by itself; where he is not, nobody uses the vGPU yet, and it is started once more.
    async fn hand_over(&self) -> Result<(), Failure> {
        // Without a label QEMU runs as libvirt does: as root, who may connect to any socket.
        let Some(owner) = self.owner else { return Ok(()) };
        let claims = self.claims().await?;
        for wanted in &self.vgpus {
            let vgpu = self.client.vgpu(wanted.uuid, None).await?;
            let socket = vgpu.socket.clone().unwrap_or_default();
            if owner.uid == 0 || fs::metadata(&socket).is_ok_and(|socket| socket.uid() == owner.uid)
            {
                continue;
            }
            if wanted.mdev_type.is_none() && !vgpu.defined {
                return Err(Failure::NotNow(format!(
                    "vGPU {} is not for user {}, as whom the QEMU of domain '{}' runs; stop it, and start it with \
                     --owner {}",
                    wanted.uuid, owner.uid, self.name, owner.uid
                )));
            }
            self.stop(wanted.uuid).await?;
            let started = self.begin(wanted, vgpu.defined, &claims).await;
            started.map_err(|failure| self.explained(wanted, &failure))?;
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

/// The user and group that libvirt names: `+64055`, or a name.
fn owner((user, group): &(String, String)) -> Result<Account, Failure> {
    let users = Users::read();
    let user = user.trim_start_matches('+');
    let uid = users.user(user).map(|account| account.uid);
    let gid = users.group(group.trim_start_matches('+'));
    match (uid, gid) {
        (Some(uid), Some(gid)) => Ok(Account { uid, gid }),
        _ => Err(Failure::Local(format!(
            "There is no user {user:?} or no group {group:?}, as whom QEMU would run"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_numbers_or_names() {
        let of = |user: &str, group: &str| owner(&(user.to_owned(), group.to_owned()));
        let account = of("+64055", "+993").unwrap();
        assert_eq!((account.uid, account.gid), (64055, 993));
        assert_eq!(of("root", "root").unwrap().uid, 0);
        assert!(
            of("no such user", "root").unwrap_err().to_string().contains("as whom QEMU would run")
        );
    }
}
