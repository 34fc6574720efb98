package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/oci"
)

const (
	installDir = "/dependency-env" // where an installer sees its target
	uvPath     = "/opt/uv"         // and uv
)

// installPath is the PATH of an installer in a box, as the published SDK has it:
// builds look for compilers.
const installPath = "/usr/local/bin:/usr/bin:/bin"

// Install implements Launcher. The installer writes to its target and its scratch
// directory, and talks to a proxy of ours that knows the hosts of the package
// index; it has no other network.
func (b *box) Install(ctx context.Context, spec InstallSpec) (err error) {
	inside, err := insideSpec(spec)
	if err != nil {
		return err
	}
	ctx, done, err := b.live.install(ctx)
	if err != nil {
		return err
	}
	defer done()
	pin := filepath.Join(b.dir, "netns", newID("net"))
	if err := netns.Create(pin); err != nil {
		return err
	}
	defer func() {
		if rerr := netns.Remove(pin); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	l, err := netns.Listen(pin, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	hosts, err := indexHosts(spec.Index, b.cfg.IndexHosts)
	if err != nil {
		l.Close()
		return err
	}
	proxy := serveIndex(l, hosts, b.log)
	defer proxy.close()

	argv, env := inside.Command()
	if len(argv) == 0 {
		return errdefs.New(errdefs.Internal, "the installer has no command")
	}
	at := "http://" + l.Addr().String()
	env = append(env, "PATH="+installPath, "PIP_PROXY="+at)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"} {
		env = append(env, name+"="+at)
	}
	certs, err := certificates(spec.Scratch)
	if err != nil {
		return err
	}
	env = append(env, certs...)
	box := launch{
		name: "install", shape: installShape, policy: b.cfg.Policy, cwd: "/tmp", netns: pin, argv: argv, env: env,
		own: []oci.Bind{{Source: spec.Target, Dest: installDir}, {Source: spec.Scratch, Dest: "/tmp"}},
	}
	if spec.Uv != "" {
		real, err := filepath.EvalSymlinks(spec.Uv)
		if err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "the installer %s cannot be found: %v", spec.Uv, err)
		}
		box.binds = []oci.Bind{{Source: real, Dest: uvPath}}
	}
	p, err := b.launch(ctx, box)
	if err != nil {
		return err
	}
	if err := runInstaller(ctx, p); err != nil {
		return err
	}
	// The tree is the runtime's from now on: no box's user may change it.
	if err := ownAll(ctx, spec.Target, os.Geteuid()); err != nil {
		return fmt.Errorf("take over what was installed: %w", err)
	}
	return os.Chmod(spec.Target, 0o755)
}

// maxCertificates bounds a file of certificates; the world's authorities take
// 250 KiB.
const maxCertificates = 8 << 20

// certificates copies the authorities that this program's environment names for
// the package index to where an installer in a box can read them.
func certificates(scratch string) (env []string, err error) {
	root, err := os.OpenRoot(scratch) // an installer may have been there before
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, name := range []string{"CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"} {
		file := os.Getenv(name)
		if st, err := os.Stat(file); file == "" || err != nil || !st.Mode().IsRegular() || st.Size() > maxCertificates {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read the certificates that %s names: %w", name, err)
		}
		at := strings.ToLower(name) + ".pem"
		if err := root.WriteFile(at, b, 0o600); err != nil {
			return nil, fmt.Errorf("show an installer the certificates that %s names: %w", name, err)
		}
		env = append(env, name+"="+path.Join("/tmp", at))
	}
	return env, nil
}

// insideSpec is spec as the installer sees it in its box.
func insideSpec(spec InstallSpec) (InstallSpec, error) {
	for what, p := range map[string]string{"target": spec.Target, "scratch directory": spec.Scratch, "requirements file": spec.Requirements} {
		if !filepath.IsAbs(p) {
			return InstallSpec{}, errdefs.New(errdefs.Invalid, "the installer's %s is %q and must be an absolute path", what, p)
		}
	}
	rest, ok := strings.CutPrefix(filepath.Clean(spec.Requirements), filepath.Clean(spec.Scratch)+"/")
	if !ok {
		return InstallSpec{}, errdefs.New(errdefs.Invalid, "the requirements file %s lies outside of the installer's scratch directory", spec.Requirements)
	}
	in := spec
	in.Target, in.Scratch, in.Requirements = installDir, "/tmp", path.Join("/tmp", rest)
	if spec.Uv != "" {
		in.Uv = uvPath
	}
	return in, nil
}

// removeNetworks takes away the network namespaces pinned in dir.
func removeNetworks(dir string) error {
	ents, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for network namespaces that were left: %w", err)
	}
	for _, e := range ents {
		if err := netns.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
