//! Calls of the Container Runtime Interface, v1, as kubelet makes them: enough for one container
//! with devices of the Container Device Interface. The lab's kubelet is too old to name such
//! devices.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

const LIMIT: Duration = Duration::from_secs(30);
/// `NamespaceMode.NODE`: the lab's cluster has no network plugin.
const NODE: i32 = 2;
/// `ContainerState.CONTAINER_EXITED`.
const EXITED: i32 = 2;

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($(#[$kind:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[derive(Clone, PartialEq, Message)]
        struct $name { $($(#[$kind])* $field: $type,)* })*
    };
}

messages! {
    /// `PodSandboxMetadata`.
    SandboxMetadata {
        #[prost(string, tag = "1")] name: String,
        #[prost(string, tag = "2")] uid: String,
        #[prost(string, tag = "3")] namespace: String,
    }
    /// `NamespaceOption`.
    NamespaceOption {
        #[prost(int32, tag = "1")] network: i32,
    }
    /// `LinuxSandboxSecurityContext`.
    SandboxSecurity {
        #[prost(message, optional, tag = "1")] namespaces: Option<NamespaceOption>,
    }
    /// `LinuxPodSandboxConfig`.
    LinuxSandbox {
        #[prost(message, optional, tag = "2")] security: Option<SandboxSecurity>,
    }
    /// `PodSandboxConfig`.
    SandboxConfig {
        #[prost(message, optional, tag = "1")] metadata: Option<SandboxMetadata>,
        #[prost(string, tag = "3")] log_directory: String,
        #[prost(message, optional, tag = "8")] linux: Option<LinuxSandbox>,
    }
    /// `RunPodSandboxRequest`.
    RunSandbox {
        #[prost(message, optional, tag = "1")] config: Option<SandboxConfig>,
    }
    /// Requests and answers with the identifier of a sandbox or container.
    Identifier {
        #[prost(string, tag = "1")] id: String,
    }
    /// `Int64Value`.
    Number {
        #[prost(int64, tag = "1")] value: i64,
    }
    /// `KeyValue`.
    Variable {
        #[prost(string, tag = "1")] key: String,
        #[prost(string, tag = "2")] value: String,
    }
    /// `ContainerMetadata`, `ImageSpec` and `CDIDevice`: a name.
    Name {
        #[prost(string, tag = "1")] name: String,
    }
    /// `LinuxContainerSecurityContext`.
    ContainerSecurity {
        #[prost(message, optional, tag = "3")] namespaces: Option<NamespaceOption>,
        #[prost(message, optional, tag = "5")] run_as_user: Option<Number>,
    }
    /// `LinuxContainerConfig`.
    LinuxContainer {
        #[prost(message, optional, tag = "2")] security: Option<ContainerSecurity>,
    }
    /// `ContainerConfig`.
    ContainerConfig {
        #[prost(message, optional, tag = "1")] metadata: Option<Name>,
        #[prost(message, optional, tag = "2")] image: Option<Name>,
        #[prost(string, repeated, tag = "3")] command: Vec<String>,
        #[prost(message, repeated, tag = "6")] variables: Vec<Variable>,
        #[prost(string, tag = "11")] log_path: String,
        #[prost(message, optional, tag = "15")] linux: Option<LinuxContainer>,
        #[prost(message, repeated, tag = "17")] cdi_devices: Vec<Name>,
    }
    /// `CreateContainerRequest`.
    CreateContainer {
        #[prost(string, tag = "1")] sandbox: String,
        #[prost(message, optional, tag = "2")] config: Option<ContainerConfig>,
        #[prost(message, optional, tag = "3")] sandbox_config: Option<SandboxConfig>,
    }
    /// `ContainerStatus`.
    Status {
        #[prost(int32, tag = "3")] state: i32,
        #[prost(int32, tag = "7")] exit_code: i32,
    }
    /// `ContainerStatusResponse`.
    StatusAnswer {
        #[prost(message, optional, tag = "1")] status: Option<Status>,
    }
    /// An answer of which nothing is read.
    Nothing {}
}

/// A container to be run.
#[derive(Clone, Copy, Debug)]
pub struct Container<'a> {
    /// Name of the sandbox and of the container.
    pub name: &'a str,
    /// Image.
    pub image: &'a str,
    /// Program and arguments.
    pub command: &'a [&'a str],
    /// Environment variables.
    pub variables: &'a [(&'a str, &'a str)],
    /// User of its process.
    pub user: u32,
    /// Names of devices, `VENDOR/CLASS=NAME`.
    pub devices: &'a [String],
}

/// containerd, as kubelet sees it.
#[derive(Debug)]
pub struct Runtime {
    channel: Channel,
}

impl Runtime {
    /// Connects to containerd's socket.
    pub async fn connect(socket: &Path) -> Result<Self> {
        Ok(Self { channel: vgpu_kube::grpc::connect(socket).await? })
    }

    async fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        client.ready().await.context("containerd does not answer")?;
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}"))?;
        let codec = ProstCodec::<Q, A>::default();
        let answer = client.unary(tonic::Request::new(request), path, codec).await;
        Ok(answer.with_context(|| format!("containerd's {method}"))?.into_inner())
    }

    /// Runs a container in a sandbox of its own and removes both. Returns the exit status. The
    /// output is in `log_directory/main.log` of the node.
    pub async fn run(&self, container: &Container<'_>, log_directory: &str) -> Result<i32> {
        let namespaces = Some(NamespaceOption { network: NODE });
        let linux = LinuxSandbox { security: Some(SandboxSecurity { namespaces }) };
        let name = container.name.to_owned();
        let config = SandboxConfig {
            metadata: Some(SandboxMetadata { uid: name.clone(), name, namespace: "cri".into() }),
            log_directory: log_directory.to_owned(),
            linux: Some(linux),
        };
        let request = RunSandbox { config: Some(config.clone()) };
        let sandbox: Identifier = self.call("RunPodSandbox", request).await?;
        let status = self.run_in(container, config, sandbox.clone()).await;
        let _: Nothing = self.call("StopPodSandbox", sandbox.clone()).await?;
        let _: Nothing = self.call("RemovePodSandbox", sandbox).await?;
        status
    }

    async fn run_in(
        &self,
        container: &Container<'_>,
        sandbox_config: SandboxConfig,
        sandbox: Identifier,
    ) -> Result<i32> {
        let name = |name: &str| Name { name: name.to_owned() };
        let variables = container.variables.iter();
        let security = ContainerSecurity {
            namespaces: Some(NamespaceOption { network: NODE }),
            run_as_user: Some(Number { value: container.user.into() }),
        };
        let config = ContainerConfig {
            metadata: Some(name("main")),
            image: Some(name(container.image)),
            command: container.command.iter().map(|word| (*word).to_owned()).collect(),
            variables: variables
                .map(|(key, value)| Variable { key: (*key).into(), value: (*value).into() })
                .collect(),
            log_path: "main.log".to_owned(),
            linux: Some(LinuxContainer { security: Some(security) }),
            cdi_devices: container.devices.iter().map(|device| name(device)).collect(),
        };
        let request = CreateContainer {
            sandbox: sandbox.id,
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let id: Identifier = self.call("CreateContainer", request).await?;
        let _: Nothing = self.call("StartContainer", id.clone()).await?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let answer: StatusAnswer = self.call("ContainerStatus", id.clone()).await?;
            let status = answer.status.context("No status")?;
            if status.state == EXITED {
                return Ok(status.exit_code);
            }
            ensure!(Instant::now() < deadline, "The container has not ended");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
