//! vGPUs of containers, made and stopped through vgpud's control API.
//!
//! All operations can be repeated: a vGPU that exists is used again, and one that is absent counts
//! as stopped. vGPUs of the agent have names that begin with a prefix, by which they are found
//! after a restart of any process.

use std::time::Duration;

use mdev_core::ids::VgpuId;
use uuid::Uuid;
use vgpud_api::{
    Attribute, CreateVgpu, ErrorCode, Parent, ParentTypes, Scheduler, Stats, StopVgpu, Vgpu,
    VgpuState,
};
use vgpud_client::{Client, ClientError, Method, vgpu_path};

/// Namespace of the UUIDs of vGPUs (RFC 9562, version 5). It must never change: a vGPU is found by
/// its UUID after an upgrade.
const NAMESPACE: Uuid = Uuid::from_u128(0x7b0c_6f0e_54a5_4bb2_9d1d_6a0f_6b1f_7a55);

/// Number of requests to stop a vGPU that a client still uses, before it is stopped all the same.
const STOPS: u32 = 10;
/// Pause between them: a client that has ended leaves within milliseconds.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the UUID of the vGPU for these words, for example a claim's UID, a device and a share.
/// The same words give the same vGPU.
pub fn id(words: &[&str]) -> VgpuId {
    VgpuId(Uuid::new_v5(&NAMESPACE, words.join("/").as_bytes()))
}

/// Purpose of a vGPU of the agent, part of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A resource claim.
    Claim,
    /// A device of a device plugin.
    Device,
}

impl Purpose {
    /// Returns the name of a vGPU.
    pub fn name(self, id: VgpuId) -> String {
        format!("{}{id}", self.prefix())
    }

    /// Returns the beginning of the names of vGPUs.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Claim => "kube-claim-",
            Self::Device => "kube-device-",
        }
    }

    /// Returns whether a vGPU with this name has this purpose.
    pub fn has(self, name: Option<&str>) -> bool {
        name.is_some_and(|name| name.starts_with(self.prefix()))
    }
}

/// vGPU that a container needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedVgpu {
    /// UUID.
    pub id: VgpuId,
    /// Purpose, part of its name.
    pub purpose: Purpose,
    /// Physical GPU.
    pub parent: String,
    /// vGPU type.
    pub mdev_type: String,
    /// User that its clients run as, by number.
    pub owner: u32,
    /// Attributes besides name and owner.
    pub attrs: Vec<(&'static str, String)>,
}

impl WantedVgpu {
    /// Returns all attributes.
    fn attributes(&self) -> Vec<Attribute> {
        let name = ("name", self.purpose.name(self.id));
        let owner = ("owner", self.owner.to_string());
        let all = self.attrs.iter().cloned().chain([name, owner]);
        all.map(|(name, value)| [(name.to_owned(), value)].into()).collect()
    }

    /// Returns whether a vGPU is this one, with the same settings, and works.
    fn is_met_by(&self, vgpu: &Vgpu) -> bool {
        let works = matches!(vgpu.state, VgpuState::Running | VgpuState::Restarting);
        works
            && vgpu.parent == self.parent
            && vgpu.live_type.as_deref() == Some(self.mdev_type.as_str())
            && vgpu.live_attrs.as_ref() == Some(&self.attributes())
    }
}

/// Operations on vGPUs of the agent.
#[derive(Clone, Debug)]
pub struct Vgpus {
    client: Client,
}

type Result<T> = std::result::Result<T, ClientError>;

impl Vgpus {
    /// Creates the operations on the manager of a client.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Returns the physical GPUs.
    pub async fn parents(&self) -> Result<Vec<Parent>> {
        self.client.get("/v1/parents").await
    }

    /// Returns the listed types of all physical GPUs.
    pub async fn types(&self) -> Result<Vec<ParentTypes>> {
        self.client.get("/v1/types").await
    }

    /// Returns the schedulers of all physical GPUs.
    pub async fn schedulers(&self) -> Result<Vec<Scheduler>> {
        self.client.get("/v1/schedulers").await
    }

    /// Returns the statistics of all running vGPUs.
    pub async fn stats(&self) -> Result<Stats> {
        self.client.get("/v1/stats").await
    }

    /// Returns a vGPU, if it exists.
    pub async fn find(&self, id: VgpuId) -> Result<Option<Vgpu>> {
        self.client.find(id).await
    }

    /// Returns the running vGPUs of a purpose.
    pub async fn of(&self, purpose: Purpose) -> Result<Vec<Vgpu>> {
        let mut all: Vec<Vgpu> = self.client.get("/v1/vgpus").await?;
        all.retain(|vgpu| purpose.has(vgpu.name.as_deref()) && vgpu.state != VgpuState::Stopped);
        Ok(all)
    }

    /// Returns the vGPU that a container needs: the running one, or a new one. One with other
    /// settings, or that has failed, is replaced.
    pub async fn ensure(&self, wanted: &WantedVgpu) -> Result<Vgpu> {
        if let Some(vgpu) = self.find(wanted.id).await? {
            if wanted.is_met_by(&vgpu) {
                return Ok(vgpu);
            }
            self.stop(wanted.id).await?;
        }
        match self.start(wanted).await {
            // Another request was faster.
            Err(error) if error.code() == Some(ErrorCode::Conflict) => {
                let found = self.find(wanted.id).await?.filter(|vgpu| wanted.is_met_by(vgpu));
                found.ok_or(error)
            }
            other => other,
        }
    }

    /// Starts a new vGPU, in place of one with the same UUID. Fails with [`ErrorCode::InUse`] if a
    /// client uses that one and does not leave within a moment.
    pub async fn renew(&self, wanted: &WantedVgpu) -> Result<Vgpu> {
        self.stop_left(wanted.id).await?;
        self.start(wanted).await
    }

    async fn start(&self, wanted: &WantedVgpu) -> Result<Vgpu> {
        let request = CreateVgpu {
            uuid: Some(wanted.id),
            parent: Some(wanted.parent.clone()),
            mdev_type: Some(wanted.mdev_type.clone()),
            attrs: wanted.attributes(),
            run: true,
            ..CreateVgpu::default()
        };
        self.client.post("/v1/vgpus", &request).await
    }

    /// Stops a vGPU. Its clients get a moment to leave. Does nothing if the vGPU is absent.
    pub async fn stop(&self, id: VgpuId) -> Result<()> {
        match self.stop_left(id).await {
            Err(error) if error.code() == Some(ErrorCode::InUse) => self.try_stop(id, true).await,
            other => other,
        }
    }

    /// Stops a vGPU whose clients leave within a moment, or fails with [`ErrorCode::InUse`].
    async fn stop_left(&self, id: VgpuId) -> Result<()> {
        for _ in 1..STOPS {
            match self.try_stop(id, false).await {
                Err(error) if error.code() == Some(ErrorCode::InUse) => {
                    tokio::time::sleep(STOP_INTERVAL).await;
                }
                other => return other,
            }
        }
        self.try_stop(id, false).await
    }

    /// Stops a vGPU that no client uses, and returns whether it is stopped.
    pub async fn stop_unused(&self, id: VgpuId) -> Result<bool> {
        match self.try_stop(id, false).await {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Some(ErrorCode::InUse) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn try_stop(&self, id: VgpuId, force: bool) -> Result<()> {
        let path = format!("{}/stop", vgpu_path(id));
        match self.client.request(Method::POST, &path, &StopVgpu { force }).await {
            Err(error) if error.is_not_found() => Ok(()),
            // It is not running.
            Err(error) if error.code() == Some(ErrorCode::Conflict) => {
                let stopped = match self.find(id).await? {
                    None => true,
                    Some(vgpu) => vgpu.state == VgpuState::Stopped,
                };
                if stopped { Ok(()) } else { Err(error) }
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_words_give_the_same_vgpu_in_each_release() {
        let words = ["4f5e3b1c-0000-4000-8000-000000000000", "soft0", "share"];
        assert_eq!(id(&words), id(&words));
        assert_ne!(id(&words), id(&words[..2]));
        assert_eq!(id(&words).to_string(), "daac3f24-5748-571e-837d-91e94cae3e1b");
    }

    #[test]
    fn names_tell_the_purpose() {
        let id = id(&["a"]);
        let name = Purpose::Claim.name(id);
        assert!(name.parse::<mdev_core::definition::VgpuName>().is_ok(), "{name}");
        assert!(Purpose::Claim.has(Some(&name)) && !Purpose::Device.has(Some(&name)));
        assert!(!Purpose::Claim.has(Some("web1")) && !Purpose::Claim.has(None));
    }
}
