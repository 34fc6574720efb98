package deptree

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Installer runs an installer with the rights the profile gives it: directly, or
// in a box. It must have ended everything it started when it returns. A non-zero
// exit is an *InstallError; a done ctx is its error.
type Installer interface {
	Install(ctx context.Context, spec InstallSpec) error
}

// InstallSpec is one run of an installer. Only Target and Scratch may be written.
type InstallSpec struct {
	Python       string   // the interpreter to install for, and that runs pip
	Uv           string   // path of uv; "" installs with pip
	Target       string   // absolute, the site-packages directory, empty; "" installs into Python's own environment, a virtual one
	Scratch      string   // absolute, HOME and TMPDIR of the installer, working directory
	Requirements string   // absolute path of the requirements file, below Scratch
	Index        string   // URL of the package index, may hold credentials; never in argv
	TrustedHosts []string // hosts that may be spoken to without TLS, or whose certificate is not checked
}

// Command returns the arguments and the environment of the installer, without
// PATH, proxies and certificates, which are the caller's (see HostVariables). For
// another view of the file system, change the paths in a copy of the spec first.
//
// The options of pip are those of the published SDK 0.6.3 and 0.7, except that the
// index, which may hold credentials, is in the environment, and that pip runs
// isolated (-I) from a module planted in its working directory. Those of uv ask
// for the same tree: everything installed anew into the target, by copies, no
// byte code, no cache, no configuration file, no other Python, and none of the
// sources that only uv reads.
func (s InstallSpec) Command() (argv, env []string) {
	env = []string{
		"HOME=" + s.Scratch, "TMPDIR=" + s.Scratch, "TEMP=" + s.Scratch, "TMP=" + s.Scratch,
		"PYTHONDONTWRITEBYTECODE=1", "PYTHONNOUSERSITE=1", "PYTHONUNBUFFERED=1",
	}
	if s.Uv != "" {
		argv = []string{s.Uv, "pip", "install", "--python", s.Python, "--requirements", s.Requirements,
			"--no-cache", "--no-config", "--no-progress", "--no-sources", "--no-python-downloads",
			"--link-mode", "copy", "--color", "never"}
		if s.Target != "" {
			argv = append(argv, "--target", s.Target)
		}
		for _, h := range s.TrustedHosts {
			argv = append(argv, "--allow-insecure-host", h)
		}
		if s.Index != "" {
			env = append(env, "UV_DEFAULT_INDEX="+s.Index)
		}
		return argv, append(env, "UV_NO_COMPILE_BYTECODE=1")
	}
	argv = []string{s.Python, "-I", "-B", "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir",
		"--no-compile", "--no-input", "--no-warn-script-location", "--progress-bar", "off", "--requirement", s.Requirements}
	if s.Target != "" {
		argv = append(argv, "--ignore-installed", "--target", s.Target)
	}
	for _, h := range s.TrustedHosts {
		argv = append(argv, "--trusted-host", h)
	}
	if s.Index != "" {
		env = append(env, "PIP_INDEX_URL="+s.Index)
	}
	return argv, append(env, "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_CACHE_DIR="+s.Scratch+"/pip-cache", "PIP_NO_COLOR=1")
}

// HostVariables names the variables of the runtime's own environment that an
// installer run directly also gets (published SDK 0.6.3 and 0.7).
func HostVariables() []string {
	return []string{"PATH", "LANG", "LC_ALL",
		"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
		"CURL_CA_BUNDLE", "PIP_CERT", "PIP_CLIENT_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"}
}

// InstallError is an installer that ended with a status other than 0.
type InstallError struct {
	Exit   int    // exit status; -1 if a signal ended it
	Output string // the end of what it wrote, at most a few KiB; may hold secrets
}

// Error returns the exit status alone: the output may hold secrets.
func (e *InstallError) Error() string { return fmt.Sprintf("installer exit code %d", e.Exit) }

// run calls the installer within its time and puts its failure into words.
func (s *Store) run(ctx context.Context, spec InstallSpec) error {
	limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err := s.cfg.Install.Install(limited, spec)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case limited.Err() != nil:
		return errdefs.Wrap(err, errdefs.Unavailable, "dependency installer timed out after %s", s.cfg.Timeout).
			WithNext("see whether the package index answers")
	}
	if e, ok := errors.AsType[*InstallError](err); ok {
		said := s.reason(e.Output)
		s.log.Warn("a dependency installer failed", "exit", e.Exit, "output", s.hide(e.Output))
		return errdefs.Wrap(err, errdefs.Unavailable, "dependency installer exit code %d%s", e.Exit, said).
			WithNext("see the runtime's log, then apply the installation again")
	}
	return err
}

// maxReason bounds what of an installer's output is told to the control plane.
const maxReason = 400

// reason is the part of an installer's output that says why, redacted.
func (s *Store) reason(output string) string {
	lines := strings.Split(strings.TrimSpace(s.hide(output)), "\n")
	said := ""
	for i, l := range lines {
		// pip's last complaint; uv's ("error:", "×") come first and explain in what follows.
		if l = strings.TrimSpace(l); strings.HasPrefix(l, "ERROR:") {
			said = l
		} else if strings.HasPrefix(l, "error:") || strings.HasPrefix(l, "×") {
			said = strings.Join(strings.Fields(strings.Join(lines[i:], " ")), " ")
			break
		}
	}
	if said == "" {
		said = strings.TrimSpace(lines[len(lines)-1])
	}
	said = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(said, "?"))
	if r := []rune(said); len(r) > maxReason {
		said = string(r[:maxReason]) + "…"
	}
	if said == "" {
		return ""
	}
	return ": " + said
}

// hide redacts, and also takes out the credentials of the index wherever they
// stand alone.
func (s *Store) hide(text string) string {
	for _, secret := range s.secrets {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return redact(text)
}

// A URL's credentials and its query, which often is one.
var (
	userInfo = regexp.MustCompile(`(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@"'<>]*(?:@[^\s/@"'<>]*)*@`)
	urlQuery = regexp.MustCompile(`(?i)\b([a-z][a-z0-9+.-]*://[^\s?#"'<>]*)[?][^\s#"'<>]*`)
)

// redact takes the credentials and the queries out of the URLs of a text.
func redact(text string) string {
	return urlQuery.ReplaceAllString(userInfo.ReplaceAllString(text, "$1***@"), "$1?***")
}
