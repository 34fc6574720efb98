package deptree

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/shelf"
)

// Prepare returns the tree of an artifact, given by its digest and its code
// directory, and makes it if it is not there. One caller of this process makes a
// tree at a time, the others wait and reuse it; of several processes the first
// wins. Every message may be shown to the control plane: credentials are taken
// out. Errors: invalid and exhausted (the requirements, the tree), unavailable
// (the installer, its time, the interpreter), internal (this machine), the cause
// of ctx.
func (s *Store) Prepare(ctx context.Context, artifactDigest, code string) (Tree, error) {
	if !ident.IsDigest(artifactDigest) {
		return Tree{}, errdefs.New(errdefs.Invalid, "the artifact's digest must be 64 lower-case hex digits")
	}
	requirements, err := readRequirements(code)
	if err != nil {
		s.failed()
		return Tree{}, err
	}
	key := s.key(artifactDigest, requirements)
	done, err := s.shelf.Turn(ctx, key.Digest)
	if err != nil {
		return Tree{}, err
	}
	defer done()
	hit, err := s.reuse(ctx, key, requirements)
	if err != nil {
		s.failed()
		return Tree{}, err
	}
	if hit {
		s.mu.Lock()
		s.count.CacheHits++
		s.mu.Unlock()
		s.shelf.Touch(key.Digest)
		return s.tree(key.Digest), nil
	}
	start := time.Now()
	err = s.make(ctx, key, requirements)
	if err == nil {
		if problem := s.check(key); problem != "" {
			err = errdefs.New(errdefs.Internal, "the dependency tree cannot be used right after its publication: %s", problem)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count.Misses++
	s.count.PrepareSecondsLast = time.Since(start).Seconds()
	s.count.PrepareSecondsTotal += s.count.PrepareSecondsLast
	if err != nil {
		s.count.Failures++
		return Tree{}, err
	}
	return s.tree(key.Digest), nil
}

// Ready reports whether Prepare is known to need no installer: the tree is there, or
// nothing is asked for. It asks no interpreter.
func (s *Store) Ready(artifactDigest, code string) bool {
	requirements, err := readRequirements(code)
	if err != nil || len(strings.TrimSpace(string(requirements))) == 0 {
		return true // at once, or refused at once
	}
	return s.check(s.key(artifactDigest, requirements)) == ""
}

func (s *Store) failed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count.Failures++
}

// reuse reports whether the tree is ready. The SDK requirement of a tree that was
// made under other rules is admitted again.
func (s *Store) reuse(ctx context.Context, key ready, requirements []byte) (bool, error) {
	if problem := s.check(key); problem != "" {
		if problem != missing {
			s.log.Warn("a damaged dependency tree is made again", "digest", key.Digest, "problem", problem)
		}
		return false, nil
	}
	b, err := readSmall(s.shelf.Path(key.Digest), admissionName, 64<<10)
	if err == nil {
		var a admission
		if err := json.Unmarshal(b, &a); err == nil {
			if a.Relaxed != "" && !s.cfg.RelaxedPin {
				return false, s.mismatch(a.Relaxed)
			}
			return true, nil
		}
	}
	_, err = s.parse(ctx, requirements)
	return err == nil, err
}

// parse applies the rules to requirements.txt.
func (s *Store) parse(ctx context.Context, requirements []byte) (reply, error) {
	if len(strings.TrimSpace(string(requirements))) == 0 {
		return reply{}, nil
	}
	r, err := s.ask(ctx, question{Do: "parse", Text: string(requirements), SDK: s.cfg.Interp.SDK, Most: maxRequirements})
	if err == nil && r.Relaxed != "" && !s.cfg.RelaxedPin {
		err = s.mismatch(r.Relaxed)
	}
	return r, err
}

// make installs, validates and publishes a tree.
func (s *Store) make(ctx context.Context, key ready, requirements []byte) error {
	r, err := s.parse(ctx, requirements)
	if err != nil {
		return err
	}
	stage, err := s.shelf.Stage(key.Digest)
	if err != nil {
		return err
	}
	defer func() {
		if e := stage.Discard(); e != nil {
			s.log.Warn("a failed preparation left files until the next start", "digest", key.Digest, "error", e)
		}
	}()
	if err := s.step("staged"); err != nil {
		return err
	}
	site := filepath.Join(stage.Path, sitePackages)
	if err := os.Mkdir(site, 0o700); err != nil {
		return shelf.Refusal(err, "the dependency tree cannot be made")
	}
	if len(r.Requirements) > 0 {
		if err := s.install(ctx, stage.Path, site, r.Requirements); err != nil {
			return err
		}
	}
	if err := s.step("installed"); err != nil {
		return err
	}
	if err := s.walk(ctx, site); err != nil {
		return err
	}
	if len(r.Requirements) > 0 {
		v, err := s.ask(ctx, question{Do: "validate", Site: site, Requirements: r.Requirements, Most: maxMetadata})
		if err != nil {
			return err
		}
		if n := len(v.Missing); n > 0 {
			return errdefs.New(errdefs.Unavailable, "%d unsatisfied requirements after the installation: %s", n, redact(short(v.Missing)))
		}
	}
	if err := s.step("validated"); err != nil {
		return err
	}
	if err := s.write(stage.Path, key, r); err != nil {
		return err
	}
	if err := s.step("marked"); err != nil {
		return err
	}
	// Scripts in site-packages/bin keep their execute bits, nothing keeps others.
	if err := stage.Seal(ctx, func(_ string, now fs.FileMode) fs.FileMode { return now.Perm()&0o555 | 0o444 }); err != nil {
		return err
	}
	return stage.Publish(func(string) bool { return s.check(key) == "" })
}

// install writes the requirements and runs the installer; its scratch is gone afterwards.
func (s *Store) install(ctx context.Context, dir, site string, requirements []string) error {
	scratch := filepath.Join(dir, scratchDir)
	tmp := filepath.Join(scratch, "tmp")
	file := filepath.Join(tmp, "requirements.txt")
	err := os.Mkdir(scratch, 0o700)
	if err == nil {
		err = os.Mkdir(tmp, 0o700)
	}
	if err == nil {
		err = os.WriteFile(file, []byte(strings.Join(requirements, "\n")+"\n"), 0o600)
	}
	if err != nil {
		return shelf.Refusal(err, "the requirements cannot be written for the installer")
	}
	err = s.run(ctx, InstallSpec{Python: s.cfg.Interp.Path, Uv: s.cfg.Uv, Target: site, Scratch: tmp, Requirements: file,
		Index: s.cfg.IndexURL, TrustedHosts: s.cfg.TrustedHosts})
	if err != nil {
		return err // the stage goes, and the scratch with it
	}
	err = os.RemoveAll(scratch)
	if s.cfg.Uv != "" { // uv locks its target by a file that it leaves there
		err = errors.Join(err, os.RemoveAll(filepath.Join(site, ".lock")))
	}
	if err != nil {
		return shelf.Refusal(err, "what the installer left cannot be removed")
	}
	return nil
}

// write marks the tree.
func (s *Store) write(dir string, key ready, r reply) error {
	for name, v := range map[string]any{
		admissionName: admission{Relaxed: r.Relaxed},
		readyName:     key, // fields in the order of their names
	} {
		b, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), append(b, '\n'), 0o400)
		}
		if err != nil {
			return shelf.Refusal(err, "the mark of the dependency tree cannot be written")
		}
	}
	return nil
}

// walk refuses what has no place in a tree, before anything in it is read.
func (s *Store) walk(ctx context.Context, site string) error {
	entries, bytes := 0, int64(0)
	err := filepath.WalkDir(site, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == site {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if entries++; entries > s.cfg.Limits.Entries {
			return errdefs.New(errdefs.Exhausted, "the dependency tree has too many entries: the limit is %d", s.cfg.Limits.Entries)
		}
		switch {
		case d.IsDir():
			return nil
		case d.Type()&fs.ModeSymlink != 0:
			return errdefs.New(errdefs.Invalid, "the dependency tree contains a symbolic link")
		case !d.Type().IsRegular():
			return errdefs.New(errdefs.Invalid, "the dependency tree contains a special file")
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		// Another name of the file would stay writable outside.
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
			return errdefs.New(errdefs.Invalid, "the dependency tree contains a hard link, a special file here")
		}
		if bytes += info.Size(); bytes > s.cfg.Limits.Bytes {
			return errdefs.New(errdefs.Exhausted, "the dependency tree exceeds its total size limit of %d bytes", s.cfg.Limits.Bytes)
		}
		return nil
	})
	if err == nil || ctx.Err() != nil || errdefs.CodeOf(err) != errdefs.Internal {
		return err
	}
	return shelf.Refusal(err, "the dependency tree cannot be read")
}
