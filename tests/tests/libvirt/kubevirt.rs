//! KubeVirt's hook: what it makes of a VM's domain is defined and booted by libvirt.
//!
//! The machine is virt-launcher's pod: the folder with the vGPU's sockets is mounted as a claim's
//! file of the Container Device Interface mounts it, the hook serves its socket, and the test makes
//! virt-launcher's calls.

#![allow(clippy::unwrap_used)]

use lab::build::{self, Profile};
use lab::progress::Progress;
use vgpu_kube::grpc;
use vgpu_kube::proto::kubevirt::{info, plugins, v1alpha3};

use crate::host::*;

const HOOK: &str = "/run/kubevirt-hooks/tessera-vgpu.sock";
/// What KubeVirt writes into a domain besides the devices.
const OF_KUBEVIRT: &str = "\
<metadata><kubevirt xmlns='http://kubevirt.io'><uid>4f5e3b1c-0000-4000-8000-000000000000</uid>
  <graceperiod><deletionGracePeriodSeconds>30</deletionGracePeriodSeconds></graceperiod></kubevirt></metadata>
  <vcpu placement='static'>1</vcpu><iothreads>1</iothreads>
  <clock offset='utc'><timer name='rtc' tickpolicy='catchup'/></clock>";

/// Starts the hook, and a vGPU in the place where a claim brings it into the pod. Returns its UUID.
fn prepare_pod(host: &Host) -> String {
    let program = build::kube(Profile::Dev, &Progress::new()).unwrap();
    host.machine.install(&program, "/usr/bin/vgpu-kube").unwrap();
    let uuid = host.sh(&format!("vgpuctl start -p soft0 -t {TYPE}")).trim().to_owned();
    host.sh(&format!(
        "mkdir -p /run/tessera/vgpu && mount --bind /run/vgpud/vgpus/{uuid}/clients \
         /run/tessera/vgpu && mount -o remount,bind,ro,nosuid,nodev /run/tessera/vgpu"
    ));
    host.sh(&format!("systemd-run --quiet --unit=hook /usr/bin/vgpu-kube hook --socket {HOOK}"));
    host.eventually("the hook listens", || host.machine.path(HOOK).exists());
    uuid
}

/// Makes virt-launcher's calls for a domain, in both of KubeVirt's interfaces.
async fn ask_hook(host: &Host, xml: &str) -> String {
    let channel = grpc::connect(&host.machine.path(HOOK)).await.unwrap();
    let mut about = info::info_client::InfoClient::new(channel.clone());
    let about = about.info(info::InfoParams {}).await.unwrap().into_inner();
    assert_eq!(about.hook_points[0].name, "OnDefineDomain");
    assert!(about.versions.contains(&"v1alpha3".to_owned()));
    let mut sidecar = v1alpha3::callbacks_client::CallbacksClient::new(channel.clone());
    let params = v1alpha3::OnDefineDomainParams { domain_xml: xml.into(), vmi: "{}".into() };
    let edited = sidecar.on_define_domain(params).await.unwrap().into_inner().domain_xml;
    let mut plugin = plugins::domain_hook_service_client::DomainHookServiceClient::new(channel);
    let request = plugins::MutateDomainRequest {
        domain_type: "libvirt".to_owned(),
        domain: xml.into(),
        ..plugins::MutateDomainRequest::default()
    };
    let mutated = plugin.mutate_domain(request).await.unwrap().into_inner().domain;
    assert_eq!(mutated, edited, "both interfaces give the same domain");
    String::from_utf8(edited).unwrap()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_domain_from_the_hook_boots_with_its_vgpu() {
    let Some((host, _, programs)) = Host::bare() else { return };
    host.machine.write(&format!("{UNIT}.d/parent.conf"), PARENT).unwrap();
    host.install(programs);
    let uuid = prepare_pod(&host);
    let xml = domain("ns_vm1", OF_KUBEVIRT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let edited = runtime.block_on(ask_hook(&host, &xml));

    host.machine.write("/root/ns_vm1.xml", &edited).unwrap();
    host.sh("virt-xml-validate /root/ns_vm1.xml domain && virsh define /root/ns_vm1.xml");
    let mut guest = host.boot("ns_vm1");
    uses_its_vgpu(&host, "ns_vm1", &mut guest);
    let vgpus = host.vgpus();
    let [vgpu] = vgpus.as_slice() else { panic!("{vgpus:?}") };
    assert_eq!((&vgpu["uuid"], &vgpu["vm"]["uid"]), (&uuid.into(), &QEMU_USER.into()));
    assert_eq!(vgpu["warnings"], serde_json::json!([]), "the hook shares the guest's memory");

    host.sh("virsh destroy ns_vm1");
    host.eventually("the VM has left its vGPU", || host.vgpus()[0]["vm"].is_null());
    // virt-launcher defines the domain anew, and the hook's own result is unchanged by the hook.
    assert_eq!(runtime.block_on(ask_hook(&host, &edited)), edited);
    uses_its_vgpu(&host, "ns_vm1", &mut host.boot("ns_vm1"));
}
