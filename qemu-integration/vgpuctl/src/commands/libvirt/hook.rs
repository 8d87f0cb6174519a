//! libvirt hook, which starts vGPUs before their domain and stops them after it.
//!
//! libvirt waits for the hook and passes the domain's XML on the standard input. Calling libvirt
//! from the hook would deadlock, so the hook uses only this XML.
//!
//! | call of libvirt | action |
//! | --- | --- |
//! | `prepare begin`, before libvirt creates resources | writes the guard against plain saves, and starts the vGPUs, or fails the domain |
//! | `start begin`, when QEMU's user is known | checks that this user owns the sockets |
//! | `release end`, after the domain has ended for any reason | stops the vGPUs |
//! | `migrate begin`, on the destination host | refuses, because vGPUs cannot migrate |
//! | `restore begin`, before `prepare` of a saved domain | makes `prepare` refuse: the state has no vGPU |
//!
//! A refusal of `restore` itself counts as success in libvirt 11.3, which then drops the state.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hyper::Method;
use integrate::domain::{Domain, NAMESPACE, Vgpu as Wanted, save_guard};
use integrate::xml::MAX_BYTES;
use mdev_core::ids::VgpuId;
use vgpud_api::{CreateVgpu, StartVgpu, StopVgpu, Version, Vgpu, VgpuState};
use vgpud_host::users::{Account, Users};

use super::claims::{Claim, Claims};
use crate::cli::libvirt::Hook;
use crate::failure::Failure;
use vgpud_client::{Client, vgpu_path};

/// Time until a vGPU notices that its QEMU has exited.
const QEMU_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `libvirt hook`.
pub async fn hook(client: &Client, args: Hook) -> Result<(), Failure> {
    let mut xml = Vec::new();
    let limit = MAX_BYTES as u64 + 1;
    io::stdin().lock().take(limit).read_to_end(&mut xml).map_err(|error| {
        Failure::Local(format!("Cannot read the XML of domain '{}': {error}", args.domain))
    })?;
    let xml = String::from_utf8_lossy(&xml);
    // Ignore domains without a vGPU, even if their XML is malformed.
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
        ("start", "begin") => hook.ensure_socket_owner().await,
        ("release", "end") => hook.release().await,
        ("migrate", "begin") => Err(Failure::NotNow(format!(
            "Domain '{name}' has a vGPU, which cannot move to another host by virsh; \
             use `vgpuctl vm save --domain {name}` there and `vgpuctl vm restore` here"
        ))),
        ("restore", "begin") => {
            hook.note_restore().await;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Domain with vGPUs, for which the hook runs.
struct Hooked<'a> {
    client: &'a Client,
    name: &'a str,
    uuid: String,
    vgpus: Vec<Wanted>,
    /// QEMU's user, if the XML has it. Before `start`, only if the domain configures the user.
    owner: Option<Account>,
}

impl Hooked<'_> {
    async fn claims(&self) -> Result<Claims, Failure> {
        Claims::lock(&self.run_dir().await?)
            .map_err(|error| Failure::Local(format!("Cannot write the claim on a vGPU: {error}")))
    }

    async fn run_dir(&self) -> Result<PathBuf, Failure> {
        let version: Version = self.client.get("/v1/version").await?;
        Ok(version.run_dir.into())
    }

    /// Records that the next `prepare` is for a saved state. Without vgpud that one fails by
    /// itself.
    async fn note_restore(&self) {
        if let Ok(claims) = self.claims().await {
            let _ = claims.set_restoring(&self.uuid);
        }
    }

    /// Starts all vGPUs. After a failure, libvirt calls `release`, which stops the started ones.
    async fn prepare(&self) -> Result<(), Failure> {
        let claims = self.claims().await?;
        if claims.take_restoring(&self.uuid) {
            let name = self.name;
            return Err(Failure::NotNow(format!(
                "Domain '{name}' was saved with a vGPU, whose contents a saved state does not have; \
                 to start it anew: virsh managedsave-remove {name}; `vgpuctl vm save` saves both"
            )));
        }
        save_guard::write(&self.run_dir().await?).map_err(|error| {
            Failure::Local(format!("Cannot write the image against plain saves: {error}"))
        })?;
        for wanted in &self.vgpus {
            self.start(wanted, &claims)
                .await
                .map_err(|failure| self.in_context(wanted, &failure))?;
        }
        Ok(())
    }

    /// Adds domain and vGPU to a failure, for libvirt's message.
    fn in_context(&self, wanted: &Wanted, failure: &Failure) -> Failure {
        let description = wanted
            .mdev_type
            .as_ref()
            .map_or_else(|| format!("vGPU {}", wanted.uuid), |name| format!("vGPU of type {name}"));
        Failure::NotNow(format!("Domain '{}' cannot have its {description}: {failure}", self.name))
    }

    async fn start(&self, wanted: &Wanted, claims: &Claims) -> Result<(), Failure> {
        let uuid = wanted.uuid;
        let existing = self.client.find(uuid).await?;
        let claim = claims.get(uuid);
        let ours = claim.as_ref().is_some_and(|claim| claim.domain == self.uuid);
        let new_claim =
            |started| Claim { domain: self.uuid.clone(), name: self.name.to_owned(), started };
        if let Some(vgpu) = existing.as_ref().filter(|vgpu| vgpu.state != VgpuState::Stopped) {
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
                        "it was started for domain '{}'; if that domain does not use it any more, \
                         `vgpuctl stop -u {uuid}`",
                        claim.name
                    )));
                }
                // The administrator started the vGPU and stops it.
                None if !ours && vgpu.state == VgpuState::Running => {
                    return set(claims, uuid, &new_claim(false));
                }
                // Left over: the end of a domain was not reported, or the vGPU has failed.
                None => self.stop(uuid).await?,
            }
        }
        // Record the claim before the start, so that `release` stops the vGPU in any case.
        set(claims, uuid, &new_claim(true))?;
        self.begin(wanted, existing.is_some_and(|vgpu| vgpu.defined), claims).await
    }

    /// Starts a stopped vGPU.
    async fn begin(&self, wanted: &Wanted, defined: bool, claims: &Claims) -> Result<(), Failure> {
        let owner = self.owner.map(|Account { uid, gid }| format!("{uid}:{gid}"));
        let started = match &wanted.mdev_type {
            Some(_) => self.create(wanted, owner).await,
            None if defined => {
                let path = format!("{}/start", vgpu_path(wanted.uuid));
                let request = StartVgpu { owner, ..StartVgpu::default() };
                self.client.post::<Vgpu>(&path, &request).await.map_err(Failure::from)
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
        let name = wanted.name.as_ref().map(|name| ("name".to_owned(), name.to_string()));
        let request = CreateVgpu {
            uuid: Some(wanted.uuid),
            parent: wanted.parent.clone(),
            mdev_type: wanted.mdev_type.clone(),
            attrs: core.into_iter().chain(owner).chain(name).map(|attr| [attr].into()).collect(),
            run: true,
            ..CreateVgpu::default()
        };
        Ok(self.client.post("/v1/vgpus", &request).await?)
    }

    /// Ensures that QEMU's user owns the sockets. If the owner set by vgpud differs, restarts the
    /// vGPU, which is not in use yet.
    async fn ensure_socket_owner(&self) -> Result<(), Failure> {
        // Without a label QEMU runs as root like libvirt and can connect to every socket.
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
                    "The socket of vGPU {} is not owned by user {}, who runs the QEMU of domain \
                     '{}'; stop the vGPU, and start it with --owner {}",
                    wanted.uuid, owner.uid, self.name, owner.uid
                )));
            }
            self.stop(wanted.uuid).await?;
            let started = self.begin(wanted, vgpu.defined, &claims).await;
            started.map_err(|failure| self.in_context(wanted, &failure))?;
        }
        Ok(())
    }

    /// Stops all vGPUs that were started for the domain.
    async fn release(&self) -> Result<(), Failure> {
        let claims = self.claims().await?;
        let mut result = Ok(());
        for wanted in &self.vgpus {
            // Skip vGPUs of other domains, and vGPUs that did not start.
            let Some(claim) = claims.get(wanted.uuid).filter(|claim| claim.domain == self.uuid)
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

    /// Stops a vGPU after its VM has exited. A vGPU that is not running counts as stopped.
    async fn stop(&self, uuid: VgpuId) -> Result<(), Failure> {
        let path = format!("{}/stop", vgpu_path(uuid));
        let deadline = Instant::now() + QEMU_EXIT_TIMEOUT;
        loop {
            let stopped =
                self.client.request(Method::POST, &path, &StopVgpu { force: false }).await;
            let Err(failure) = stopped else { return Ok(()) };
            let Some(vgpu) = self.client.find(uuid).await? else { return Ok(()) };
            if vgpu.state == VgpuState::Stopped {
                return Ok(());
            }
            // The exit of a VM is noticed within milliseconds. Do not stop the vGPU of a running
            // VM.
            if vgpu.vm.is_none() || Instant::now() > deadline {
                return Err(failure.into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn set(claims: &Claims, uuid: VgpuId, claim: &Claim) -> Result<(), Failure> {
    claims
        .set(uuid, claim)
        .map_err(|error| Failure::Local(format!("Cannot write the claim on vGPU {uuid}: {error}")))
}

/// Resolves user and group as libvirt writes them: a name, or `+64055` for a number.
fn owner((user, group): &(String, String)) -> Result<Account, Failure> {
    let users = Users::read();
    let user = user.trim_start_matches('+');
    let uid = users.user(user).map(|account| account.uid);
    let gid = users.group(group.trim_start_matches('+'));
    match (uid, gid) {
        (Some(uid), Some(gid)) => Ok(Account { uid, gid }),
        _ => Err(Failure::Local(format!("QEMU's user {user:?} or group {group:?} does not exist"))),
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
            of("no such user", "root")
                .unwrap_err()
                .to_string()
                .contains("group \"root\" does not exist")
        );
    }
}
