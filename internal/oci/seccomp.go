package oci

import (
	"fmt"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Seccomp returns the system call filter of every container on this machine's
// architecture: the default profile of the Moby project, resolved for a process
// without any capability. The result is the caller's own.
func Seccomp() (*specs.LinuxSeccomp, error) {
	p, err := seccomp.GetDefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}})
	if err != nil {
		return nil, fmt.Errorf("resolve the seccomp profile: %w", err)
	}
	return p, nil
}
