# Resources of a fleet on EC2: a network, a launch template for workers, a bucket for the files of batches, and
# a role for the machines of the home region with exactly the permissions that the controller and the gateways need.
#
# docs/deploy/aws.md explains how to use it. It does not create gateways, queue and database.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = { source = "hashicorp/aws", version = "~> 5.0" }
  }
}

locals {
  tags        = { "spillway-fleet" = var.fleet_id }
  ingredients = ["image", "launch-template", "network-interface", "security-group", "snapshot", "spot-instances-request", "subnet"]
}

data "aws_caller_identity" "this" {}

data "aws_region" "this" {}

# --- network: outbound only, no inbound -----------------------------------------------------------------------------------

resource "aws_vpc" "this" {
  cidr_block           = var.cidr_block
  enable_dns_hostnames = true
  tags                 = { Name = var.fleet_id }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.fleet_id }
}

resource "aws_route_table" "this" {
  vpc_id = aws_vpc.this.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }
  tags = { Name = var.fleet_id }
}

resource "aws_subnet" "zone" {
  for_each                = { for number, zone in var.zones : zone => number }
  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr_block, 4, each.value)
  map_public_ip_on_launch = true # outbound connections without a NAT gateway, which costs more than some workers
  tags                    = { Name = "${var.fleet_id}-${each.key}" }
}

resource "aws_route_table_association" "zone" {
  for_each       = aws_subnet.zone
  subnet_id      = each.value.id
  route_table_id = aws_route_table.this.id
}

resource "aws_security_group" "workers" {
  name        = "${var.fleet_id}-workers"
  description = "Spillway workers: nothing comes in"
  vpc_id      = aws_vpc.this.id
  egress {
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_security_group" "home" {
  name        = "${var.fleet_id}-home"
  description = "Spillway home: the API from its callers, the queue from workers"
  vpc_id      = aws_vpc.this.id
  ingress {
    description = "the API, behind TLS"
    from_port   = 443
    to_port     = 443
    protocol    = "tcp"
    cidr_blocks = var.callers
  }
  ingress {
    description     = "the queue, from workers here"
    from_port       = 4222
    to_port         = 4222
    protocol        = "tcp"
    security_groups = [aws_security_group.workers.id]
    cidr_blocks     = var.workers_elsewhere
  }
  egress {
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

# --- workers --------------------------------------------------------------------------------------------------------------

resource "aws_launch_template" "worker" {
  name                   = "${var.fleet_id}-worker"
  image_id               = var.image_id
  update_default_version = true
  vpc_security_group_ids = [aws_security_group.workers.id]
  ebs_optimized          = true
  # The interruption notice is read with a token. From a container on the host's network, one hop is enough.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  block_device_mappings {
    device_name = var.root_device
    ebs {
      volume_size           = var.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
}

# --- files of batches -----------------------------------------------------------------------------------------------------

resource "aws_s3_bucket" "files" {
  bucket = "${var.fleet_id}-files-${data.aws_caller_identity.this.account_id}"
}

resource "aws_s3_bucket_public_access_block" "files" {
  bucket                  = aws_s3_bucket.files.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_lifecycle_configuration" "files" {
  bucket = aws_s3_bucket.files.id
  rule {
    id     = "uploads that were never completed"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload { days_after_initiation = 2 }
  }
}

# --- permissions of the home region -----------------------------------------------------------------------------------

resource "aws_iam_role" "home" {
  name = "${var.fleet_id}-home"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy" "home" {
  name = "fleet-and-files"
  role = aws_iam_role.home.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { Effect = "Allow", Action = "ec2:DescribeInstances", Resource = "*" },
      # Only machines and disks with our label. The other resource types are needed to launch a machine.
      {
        Effect    = "Allow"
        Action    = "ec2:RunInstances"
        Resource  = ["arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:*:*:volume/*"]
        Condition = { StringEquals = { for key, value in local.tags : "aws:RequestTag/${key}" => value } }
      },
      {
        Effect   = "Allow"
        Action   = "ec2:RunInstances"
        Resource = [for kind in local.ingredients : "arn:aws:ec2:*:*:${kind}/*"]
      },
      {
        Effect    = "Allow"
        Action    = "ec2:CreateTags"
        Resource  = "*"
        Condition = { StringEquals = { "ec2:CreateAction" = "RunInstances" } }
      },
      {
        Effect    = "Allow"
        Action    = "ec2:TerminateInstances"
        Resource  = "*"
        Condition = { StringEquals = { for key, value in local.tags : "ec2:ResourceTag/${key}" => value } }
      },
      { Effect = "Allow", Action = ["s3:ListBucket", "s3:ListBucketMultipartUploads"], Resource = aws_s3_bucket.files.arn },
      {
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
        Resource = "${aws_s3_bucket.files.arn}/*"
      },
    ]
  })
}

resource "aws_iam_instance_profile" "home" {
  name = "${var.fleet_id}-home"
  role = aws_iam_role.home.name
}
